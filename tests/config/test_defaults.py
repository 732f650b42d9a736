"""A default is stated once: by the scheduler, to which the options refer."""

from dataclasses import fields

import pytest

from headstart.config.options import EngineOptions
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.sched.step_time import MaxStepTime
from headstart.engine.engine_checks import step_limits_of

OPTIONS = {  # of SchedulerConfig, where the option has another name
    "policy": "scheduling_policy",
    "tenant_floor": "tenant_cache_floor",
}


def test_the_limits_of_default_options_are_the_default_limits() -> None:
    assert step_limits_of(EngineOptions(), Limits().max_model_len, on_cpu=False) == Limits()


@pytest.mark.parametrize(
    ("seconds", "on_cpu", "bound"),
    [
        (None, True, MaxStepTime()),
        (None, False, MaxStepTime(0.2)),
        (0.0, True, MaxStepTime(0.4)),
        (0.0, False, MaxStepTime(0.2)),
        (5.0, True, MaxStepTime(0.4)),
        (0.1, False, MaxStepTime(0.1)),
    ],
)
def test_with_a_store_a_kill_loses_short_steps_only(seconds: float | None, on_cpu: bool, bound: MaxStepTime) -> None:
    options = EngineOptions(kv_store="/kv", max_step_time=seconds)
    assert step_limits_of(options, 4096, on_cpu=on_cpu).max_step_time == bound


def test_the_settings_of_a_scheduler_have_the_options_defaults() -> None:
    options, settings = EngineOptions(), {one.name: one.default for one in fields(SchedulerConfig)}
    for name in ("enable_prefix_caching", "policy", "lpm_k", "eviction_policy", "tenant_floor", "max_pinned_share"):
        assert settings[name] == getattr(options, OPTIONS.get(name, name)), name
