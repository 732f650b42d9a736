"""vLLM with Headstart's scheduling: `--scheduler-cls headstart_plugins.vllm.Scheduler` (docs/plugins-vllm.md)."""

from headstart_plugins.vllm.host import HOST_VERSION
from headstart_plugins.vllm.prefix_scheduler import AsyncScheduler, Scheduler

__all__ = ["HOST_VERSION", "AsyncScheduler", "Scheduler"]
