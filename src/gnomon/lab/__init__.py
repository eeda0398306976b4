"""The engine of studies: stages, resume, records, tuning, claims, report, board."""

from .config import StudyConfig
from .engine import Lab
from .stage import Done, StageContext

__all__ = ["Done", "Lab", "StageContext", "StudyConfig"]
