"""Tasks: the model and data that workers train."""

from gem_worker.tasks.base import BUILT_IN, Task, TaskError, load_task

__all__ = ["BUILT_IN", "Task", "TaskError", "load_task"]
