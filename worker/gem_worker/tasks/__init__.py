"""Tasks: the model and data that workers train."""

from gem_worker.tasks.base import BUILT_IN, Task, TaskError, has_optimizer, load_task, require_name

__all__ = ["BUILT_IN", "Task", "TaskError", "has_optimizer", "load_task", "require_name"]
