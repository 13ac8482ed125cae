"""Line charts without a plotting library: as text for a terminal, as PNG for a file.

Responsible for drawing what it is given. Knows nothing of placement. Called by the replay command.
"""

from moe_serve.cli.charts.panel import Panel, Series
from moe_serve.cli.charts.png import write_png
from moe_serve.cli.charts.text import text_chart

__all__ = ["Panel", "Series", "text_chart", "write_png"]
