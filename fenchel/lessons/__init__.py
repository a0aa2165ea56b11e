"""The course: lessons as notebooks that compute and check each of their claims.

    course       the list of lessons and what the reader has done
    questions    what a lesson asks besides its code (questions.toml)
    ladder       those questions, recap cards and the page of what was mastered
    widgets      what a lesson is made of
    scene        a drawing with handles, by scene.js and maps.js, whose state goes to Python
    scenes/      the drawings, one script each
    server       the pages of ``fenchel learn``
    model_page   the whole model on one screen, run by a script in the page
    web_edition  the course as files, with every position of every control
    handout      a sheet per lesson for a class
    figures      the figures of the course as files (extra ``plot``)
    convex_program  small convex programs: their solution, multipliers and duality gap
    notebooks/   the lessons, also scripts: ``python -m fenchel.lessons.notebooks.softmax``

Only ``course`` is imported here; the lessons need the extra ``learn``.
"""

from fenchel.lessons.course import COURSE, Lesson, completed, lesson

__all__ = ["COURSE", "Lesson", "completed", "lesson"]
