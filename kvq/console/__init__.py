"""What a person sees. Words on stderr, results on stdout; the only place that knows rich."""

from kvq.console.coverage import show_coverage
from kvq.console.evaluation import show_evaluation, show_gates
from kvq.console.kv import show_kv_report
from kvq.console.plan import show_comparison, show_inspection, show_plan_report
from kvq.console.run import (
    RunProgress,
    class_rows,
    plan_dict,
    show_models,
    show_plan,
    show_result,
    show_verification,
)
from kvq.console.screen import ERR, OUT, clock, short_size, size, stages
from kvq.console.serving import show_serving
from kvq.console.tasks import show_tasks, show_tool_calls

__all__ = [
    "ERR", "OUT", "RunProgress", "class_rows", "clock", "plan_dict", "short_size", "show_comparison", "show_coverage",
    "show_evaluation", "show_gates", "show_inspection", "show_kv_report", "show_models", "show_plan",
    "show_plan_report", "show_result", "show_serving", "show_tasks", "show_tool_calls", "show_verification", "size",
    "stages",
]  # fmt: skip
