"""Pictures of schedules, loss curves and plans as PNG or SVG. No display is needed."""

from raymm.draw.graph import draw_plan
from raymm.draw.loss import draw_loss
from raymm.draw.schedule import draw_timelines

__all__ = ["draw_loss", "draw_plan", "draw_timelines"]
