"""1F1B (kept here until every caller imports it from :mod:`raymm.scheduler.lower`)."""

from raymm.scheduler.list_schedule import UNKNOWN_BACKWARD as DEFAULT_BACKWARD
from raymm.scheduler.list_schedule import UNKNOWN_FORWARD as DEFAULT_FORWARD
from raymm.scheduler.lower import lower_1f1b

__all__ = ["DEFAULT_BACKWARD", "DEFAULT_FORWARD", "lower_1f1b"]
