"""Plans one training job over chips of many vendors, simulates it, and trains it.

    plan = heteropp.plan("quickstart", "quickstart", global_batch=16)
    heteropp.simulate(plan, "quickstart").step_s
    heteropp.train(plan, "quickstart", steps=60)

A name is imported when it is first used: `import heteropp` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heteropp.api.errors import InputError, TrainingError
    from heteropp.api.planning import plan
    from heteropp.api.simulation import simulate
    from heteropp.api.training.train import train
    from heteropp.cost.expert_shares import expert_shares
    from heteropp.cost.token_shares import token_shares
    from heteropp.description.cluster import Cluster, read_cluster
    from heteropp.description.files import FileError
    from heteropp.description.hyperparameters import HyperparameterError
    from heteropp.description.model import read_model
    from heteropp.description.plan import Plan, PlanError, read_plan, write_plan
    from heteropp.models.custom.definition import ModelDefinition
    from heteropp.models.spec import ModelError, ModelSpec
    from heteropp.runtime.trainer import Trainer
    from heteropp.search.planner import DoesNotFitError, SearchError
    from heteropp.simulator.simulate import DeadlockError, Simulation

__all__ = [
    "Cluster",
    "DeadlockError",
    "DoesNotFitError",
    "FileError",
    "HyperparameterError",
    "InputError",
    "ModelDefinition",
    "ModelError",
    "ModelSpec",
    "Plan",
    "PlanError",
    "SearchError",
    "Simulation",
    "Trainer",
    "TrainingError",
    "expert_shares",
    "plan",
    "read_cluster",
    "read_model",
    "read_plan",
    "simulate",
    "token_shares",
    "train",
    "write_plan",
]

_HOMES = {
    "heteropp.api.errors": ("InputError", "TrainingError"),
    "heteropp.api.planning": ("plan",),
    "heteropp.api.simulation": ("simulate",),
    "heteropp.api.training.train": ("train",),
    "heteropp.cost.expert_shares": ("expert_shares",),
    "heteropp.cost.token_shares": ("token_shares",),
    "heteropp.description.cluster": ("Cluster", "read_cluster"),
    "heteropp.description.files": ("FileError",),
    "heteropp.description.hyperparameters": ("HyperparameterError",),
    "heteropp.description.model": ("read_model",),
    "heteropp.description.plan": ("Plan", "PlanError", "read_plan", "write_plan"),
    "heteropp.models.custom.definition": ("ModelDefinition",),
    "heteropp.models.spec": ("ModelError", "ModelSpec"),
    "heteropp.runtime.trainer": ("Trainer",),
    "heteropp.search.planner": ("DoesNotFitError", "SearchError"),
    "heteropp.simulator.simulate": ("DeadlockError", "Simulation"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
