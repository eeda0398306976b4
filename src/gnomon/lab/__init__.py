"""The engine of studies: stages, resume, records, tuning, claims, report, board."""

from .config import StudyConfig
from .engine import Lab
from .rivals import load_rival
from .stage import Done, StageContext

__all__ = ["Done", "Lab", "StageContext", "StudyConfig", "load_rival"]
