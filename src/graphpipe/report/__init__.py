"""A strategy and its traces for people: tables, pictures, one page with everything. Functions return text."""

from graphpipe.report.chrome_trace import chrome_trace
from graphpipe.report.html import html_report
from graphpipe.report.memory import memory_svg
from graphpipe.report.stage_graph import stage_graph_svg
from graphpipe.report.stage_graph_text import stage_graph_text
from graphpipe.report.table import device_table, plan_table, plan_text
from graphpipe.report.timeline import timeline_svg

__all__ = [
    "chrome_trace",
    "device_table",
    "html_report",
    "memory_svg",
    "plan_table",
    "plan_text",
    "stage_graph_svg",
    "stage_graph_text",
    "timeline_svg",
]
