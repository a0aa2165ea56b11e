"""The lessons, one notebook each, in the order of ``fenchel.lessons.course.COURSE``."""
