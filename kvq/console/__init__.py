"""What a person sees. Words on stderr, results on stdout; the only place that knows rich."""

from kvq.console.kv import show_kv_report
from kvq.console.plan import show_comparison, show_inspection, show_plan_report
from kvq.console.run import (
    RunProgress,
    class_rows,
    plan_dict,
    show_distance,
    show_models,
    show_plan,
    show_result,
    show_verification,
)
from kvq.console.screen import ERR, OUT, clock, short_size, size

__all__ = [
    "ERR", "OUT", "RunProgress", "class_rows", "clock", "plan_dict", "short_size", "show_comparison", "show_distance",
    "show_inspection", "show_kv_report",
    "show_models", "show_plan", "show_plan_report", "show_result", "show_verification", "size",
]  # fmt: skip
