"""Sites at which a failure is not put in: the program's own call, and what stands outermost.

Something of ours is called by torch or by the program, and that function cannot be guarded by
another one of ours: it is the guard. Such functions are few, and do next to nothing. What counts of
them is listed here: their entry, and the calls they make themselves before the guard holds.
"""

from __future__ import annotations

from tests.lab.harm.instrument import Site

__all__ = ["is_outermost"]

ENTRIES = {
    # the program calls these
    "rankscope.tracing": {
        *("attach", "step", "trace", "_loaded", "TraceHandle.__init__"),
    },
    "rankscope.integrations.training": {
        *("TracedTraining.__init__", "TracedTraining.begin", "TracedTraining.step"),
        "TracedTraining.end",
    },
    "rankscope.agent.activation": {"attach", "close", "current_session"},
    "rankscope.agent.session": {"Session.step"},
    "rankscope.block": {"begin_block", "_guarded", "RankBlock.finish"},
    # torch calls these
    "rankscope.agent.guard": {"GuardedHook.run", "attempt", "Guard.hook", "GuardedHook.__init__"},
    # these stand in place of functions of torch or Python, and call the original
    "rankscope.agent.steps.optimizers": {
        *("OptimizerSearch._around.making", "ScalerWatch._around.step"),
        "ScheduleWatch._around.step",
    },
    "rankscope.agent.collectives": {
        *("CollectiveWatch._issuing.issue", "CollectiveWatch._around_wait.wait"),
        *("CollectiveWatch._is_recorded", "CollectiveWatch._deriving.derive"),
    },
    "rankscope.agent.pythonstack": {"_noting_exit"},
    "rankscope_launcher.startup": {
        *("install", "_arm", "_AfterTorch.find_spec", "_ArmingLoader.exec_module"),
        *("_ArmingLoader.__init__", "_ArmingLoader.create_module", "_ArmingLoader.__getattr__"),
    },
}


def is_outermost(site: Site) -> bool:
    """True where a failure at this site has nothing of ours around it that could hold it."""
    return site.function in ENTRIES.get(site.module, ())
