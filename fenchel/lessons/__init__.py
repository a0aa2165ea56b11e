"""The course: lessons as notebooks that compute and check each of their claims.

    course       the list of lessons and the reader's progress
    widgets      what a lesson is made of
    scene        a drawing with handles, by scene.js and maps.js, whose state goes to Python
    scenes/      the drawings, one script each
    server       the pages of ``fenchel learn``
    model_page   the whole model on one screen, run by a script in the page
    web_edition  the course as files, with every position of every control
    figures      the figures of the course as files (extra ``plot``)
    notebooks/   the lessons, also scripts: ``python -m fenchel.lessons.notebooks.l07_softmax``

Only ``course`` is imported here; the lessons need the extra ``learn``.
"""

from fenchel.lessons.course import COURSE, Lesson, completed, lesson

__all__ = ["COURSE", "Lesson", "completed", "lesson"]
