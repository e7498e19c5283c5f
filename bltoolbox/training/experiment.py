"""The upper loop. Read this file first.

A step draws a batch, lets the upper-level optimizer ask the oracle about it, and moves θ. From time to time the
held-out tasks, in imaging images, are solved from a cold start; the best θ and the last one are both kept.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.penalty import penalty_at, penalty_gradient
from bltoolbox.bilevel.precision import computing
from bltoolbox.bilevel.records import Batch, Cost, Step, Theta
from bltoolbox.bilevel.roles import LowerSolver, Problem, Sampler, UpperOptimizer
from bltoolbox.bilevel.tasks import Tasks
from bltoolbox.bilevel.tensors import detached
from bltoolbox.distributed.ranks import RankFailed, RankLost
from bltoolbox.errors import BudgetExhausted, NumericalError, explain, refusing_misfits
from bltoolbox.restoration.evaluation import Evaluation, evaluate_tasks, measurable
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.results import Check, RunResult
from bltoolbox.restoration.trained import Trained
from bltoolbox.restoration.variational import Variational, VariationalTasks
from bltoolbox.runs.budget import used
from bltoolbox.runs.metric import Metric
from bltoolbox.training.baseline import tune
from bltoolbox.training.listeners import Keeper
from bltoolbox.training.misfits import check_state

if TYPE_CHECKING:
    from bltoolbox.config.recipe import Recipe

log = logging.getLogger(__name__)

BUDGET_SPENT = "budget spent"

#: Consecutive failed steps that `on_divergence` recovers from, and its messages.
_FAILURES = 10
_RECOVERY = {
    "shrink-step": "returning to the previous θ, with shorter steps",
    "skip-batch": "skipping this batch",
}

#: The fraction of `budget.seconds` that is reserved for tuning the baseline.
_BASELINE = 0.2

_UNUSABLE = "the step leads to a θ that cannot be used"
#: Consecutive steps with a hypergradient of exactly zero after which a run fails.
_ZEROS = 10
_ZERO = (
    "the hypergradient is exactly zero although the loss is not, so {effect}: the adjoint system was not iterated"
    " because its tolerance is above the size of its right-hand side, or θ does not affect the solutions; lower"
    " upper_optimizer.adjoint_tol, or set upper_optimizer.tol to auto"
)

_COLD = (
    "warm starts are dropped when a run finishes, so solves start cold: the result is that of a longer run up to the"
    " tolerances; checkpoint.keep_finished: true keeps them"
)

#: Evaluation images kept for the figure.
_PICTURES = 4


@dataclass
class Experiment:
    """A recipe, assembled."""

    recipe: Recipe
    problem: Problem
    oracle: BilevelOracle
    sampler: Sampler
    sampler_state: dict[str, Any]
    optimizer: UpperOptimizer
    theta: dict[str, Tensor]
    #: The solver of every restoration that is not a step of training.
    evaluation_solver: LowerSolver
    #: The metric by which the best θ is chosen.
    metric: Metric
    validation: Tasks | None = None
    evaluation: Tasks | None = None
    baseline: tuple[Variational, dict[str, Tensor]] | None = None
    loggers: Sequence[Listener] = ()
    #: The run directory, or None if nothing is written.
    run_dir: Path | None = None

    @property
    def needs_memory(self) -> bool:
        """Whether warm starts are iterates of a method, not only a way to save time."""
        return self.optimizer.needs_memory or self.oracle.hypergradient.needs_memory

    @property
    def train(self) -> Tasks:
        return self.oracle.tasks

    def find_flaw(self, theta: Theta, constants: bool = True) -> str | None:
        """Why θ cannot be used with this recipe; None if it can."""
        return self.model(theta).find_flaw(self.theta, self.train, constants)

    def require_usable(self, theta: Theta, sentence: str, constants: bool = True) -> None:
        """Refuse a θ that is not finite or leads to infinite values."""
        if (flaw := self.find_flaw(theta, constants)) is not None:
            raise NumericalError(f"{sentence}: {flaw}; use a smaller step")

    def model(self, theta: Theta) -> Trained:
        parts = self.evaluation_solver, dict(theta), self.recipe
        if isinstance(self.problem, Variational):
            return Model(self.problem, *parts, self.problem.samples["training"].shape)
        return Trained(self.problem, *parts)

    @detached()
    def run(
        self,
        listeners: Iterable[Listener] = (),
        keeper: Keeper | None = None,
        content: Mapping[str, Any] | None = None,
        history: Sequence[dict[str, Any]] = (),
    ) -> RunResult:
        """Train, choose between the best and the last θ, evaluate.

        With the ``content`` of a checkpoint (and the log ``history`` up to it) the run continues from there.
        """
        with computing(self.train.device, self.recipe.tf32, run=True):
            return self._run(listeners, keeper, content, history)

    def _run(
        self,
        listeners: Iterable[Listener],
        keeper: Keeper | None,
        content: Mapping[str, Any] | None,
        history: Sequence[dict[str, Any]],
    ) -> RunResult:
        run = _Run(self, [*listeners, *self.loggers], keeper)
        if content is not None:
            with refusing_misfits("the checkpoint"):
                run.restore(content, history)
        try:
            return run.run()
        finally:
            for tasks in (self.train, self.validation, self.evaluation):
                if tasks is not None:
                    tasks.close()


class _Run:
    """The state of one run."""

    def __init__(self, experiment: Experiment, listeners: list[Listener], keeper: Keeper | None) -> None:
        self.experiment = experiment
        self.listeners = listeners
        self.keeper = keeper
        self.theta = dict(experiment.theta)
        self.state = experiment.optimizer.init(self.theta)
        self.sampler_state = experiment.sampler_state
        self.steps = 0
        self.resumed = False
        #: Whether the run had finished, so that its warm starts are gone.
        self.cold = False
        #: The cost of interrupted calls, on all ranks.
        self.interrupted = Cost()
        #: The start of the run, and the time of the checks, which is not counted.
        self.ranks = experiment.oracle.ranks
        self.began = self.ranks.now()
        self.checking = 0.0
        self.history: list[dict[str, Any]] = []
        self.checks = 0
        self.best: tuple[float, int, dict[str, Tensor]] | None = None
        self.checked_at = -1
        self.since_best = 0
        self.ended: str | None = None
        #: θ before the last step, failed steps in a row, and failed steps that were recovered from.
        self.before = dict(experiment.theta)
        self.failures = 0
        self.recoveries = 0
        #: Whether a log could not be written: then no checkpoint may count its lines.
        self.unwritten = False
        #: Number of consecutive steps whose hypergradient was zero without cause.
        self.zeros = 0

    def run(self) -> RunResult:
        self.experiment.oracle.before_call = self._stop_when_spent
        self.experiment.oracle.after_call = self._checkpoint_if_due
        if self.experiment.recipe.chunk == "auto":
            oracle = self.experiment.oracle
            oracle.chunk = min(self.ranks.gather("chunk", oracle.chunk))
        self._notify("started", self.experiment)
        if self.resumed:
            self._notify("resumed", self.steps)
        if self.cold:
            self._notify("phase", _COLD)
        try:
            self._train()
            seconds = self._seconds()
            self._checkpoint()
            result = self._result(seconds)
        except BaseException as error:
            reason = f"failed: {explain(error)}" if isinstance(error, Exception) else "interrupted"
            together = self.ranks.all_failed(error)
            # On a full disk, or when a rank is gone, the previous checkpoints must suffice.
            with contextlib.suppress(OSError, RankFailed, RankLost):
                if self.ended is None and together and not self.unwritten:
                    self._note_interrupted()
                    self._checkpoint()
            with contextlib.suppress(OSError):
                self._notify("aborted", self.theta, reason)
            with contextlib.suppress(RankFailed, RankLost):
                # All ranks wait until rank 0 has written everything.
                if together:
                    self.ranks.gather("end")
            raise
        self._notify("finished", result)
        if self.keeper is not None:
            # The results are complete; what could not be deleted does no harm.
            with contextlib.suppress(OSError, RankFailed, RankLost):
                self.keeper.finish()
        return result

    def _note_interrupted(self) -> None:
        """Add up over ranks the cost of the interrupted call: the ledger counts it when it is repeated."""
        oracle = self.experiment.oracle
        mine, lost = oracle.interrupted - self.interrupted, Cost()
        for cost in self.ranks.gather("interrupted", mine.pack()):
            lost = lost + Cost.unpack(cost)
        self.interrupted = oracle.interrupted = self.interrupted + lost
        if lost.computations:
            self._notify(
                "phase", f"{lost.computations:,.0f} computations of an interrupted call will be repeated"
            )

    def snapshot(self) -> dict[str, Any]:
        """Everything in a checkpoint except the warm starts: plain data and tensors."""
        oracle = self.experiment.oracle
        return {
            "theta": self.theta,
            "optimizer": self.state,
            "sampler": self.sampler_state,
            "steps": self.steps,
            "seconds": self._seconds(),
            "checking": self.checking,
            "cost": self.experiment.oracle.cost.pack(),
            "interrupted": self.interrupted.pack(),
            "journal": self.experiment.oracle.journal.pack(),
            "own": {"trials": trials} if (trials := self.experiment.oracle.journal.trials()) else None,
            "checks": self.checks,
            "best": self.best,
            "checked_at": self.checked_at,
            "since_best": self.since_best,
            "ended": self.ended,
            "before": self.before,
            "failures": self.failures,
            "recoveries": self.recoveries,
            "zeros": self.zeros,
            "chunk": [oracle.chunk, oracle.adaptive],
        }

    def restore(self, content: Mapping[str, Any], history: Sequence[dict[str, Any]]) -> None:
        """Restore the state of ``snapshot``. A run that ended because its budget was spent continues if the budget
        has grown."""
        check_state(content, self.experiment, self.state)
        self.resumed = True
        device = self.experiment.train.device
        self.theta = _on(device, content["theta"])
        self.state = _on(device, content["optimizer"])
        self.sampler_state = content["sampler"]
        self.steps = content["steps"]
        self.checking = content["checking"]
        self.began = self.ranks.now() - content["seconds"] - self.checking
        self.experiment.oracle.cost = Cost.unpack(content["cost"])
        self.interrupted = self.experiment.oracle.interrupted = Cost.unpack(content.get("interrupted", {}))
        trials = [own["trials"] for own in content["own"]]
        lives_here = self.experiment.oracle.solutions.owns
        self.experiment.oracle.journal.restore(content["journal"], trials, device, lives_here)
        self.checks = content["checks"]
        self.best = content["best"] and (*content["best"][:2], _on(device, content["best"][2]))
        self.checked_at = content["checked_at"]
        self.since_best = content["since_best"]
        self.before = _on(device, content["before"])
        self.failures = content["failures"]
        self.recoveries = content["recoveries"]
        self.zeros = content.get("zeros", 0)
        if self.experiment.recipe.chunk == "auto" and "chunk" in content:
            oracle = self.experiment.oracle
            oracle.chunk, oracle.adaptive = max(1, int(content["chunk"][0])), bool(content["chunk"][1])
        self.history = list(history)
        self.ended = content["ended"]
        if self.ended == BUDGET_SPENT and self._fraction() < 1:
            self.ended = None
            self.cold = bool(content.get("dropped"))
            self.checks = int(self._fraction() * self.experiment.recipe.validation.checks)

    def _train(self) -> None:
        """Take steps until the budget is spent or there is another reason to end."""
        if self.checked_at < 0:
            self._check(None)
        while self.ended is None:
            if self._fraction() >= 1:
                self.ended = BUDGET_SPENT
                break
            batch, sampler_state = self.experiment.sampler.next(self.sampler_state)
            self._announce(sampler_state)
            self.experiment.oracle.latest = None
            try:
                step = self.experiment.optimizer.step(
                    self.theta, self.experiment.oracle.on(batch), self.state
                )
                self.experiment.require_usable(step.theta, _UNUSABLE, constants=False)
            except BudgetExhausted:
                self.ended = BUDGET_SPENT
                break
            except NumericalError as error:
                self._recover(error, sampler_state)
                continue
            if step.finished:
                self.ended = step.finished
                self.experiment.oracle.end_step()
                break
            self._take(step, batch, sampler_state)
            self._checkpoint_if_due()
        if self.checked_at != self.steps:
            self._check(None)

    def _announce(self, sampler_state: dict[str, Any]) -> None:
        """Tell the oracle what the next step will draw, where that helps and does not depend on this step.

        A copy of the sampler draws, so that a draw is the same whether or not it was announced.
        """
        oracle, sampler = self.experiment.oracle, self.experiment.sampler
        if oracle.tasks.reads_ahead and not sampler.offers("observe"):
            oracle.announce(copy.deepcopy(sampler).next(copy.deepcopy(sampler_state))[0])

    def _recover(self, error: NumericalError, sampler_state: dict[str, Any]) -> None:
        """Recover from a failed step as the recipe says, or stop."""
        message = f"step {self.steps + 1}: {error}"
        policy = self.experiment.recipe.on_divergence
        self.failures += 1
        if policy == "stop":
            raise NumericalError(message) from error
        if self.failures > _FAILURES:
            raise NumericalError(f"{message} (after {_FAILURES} attempts to recover)") from error
        self.recoveries += 1
        self.experiment.oracle.end_step()
        self.sampler_state = sampler_state
        if policy == "shrink-step":
            self.theta = dict(self.before)
            self.state = self.experiment.optimizer.shorten(self.state, 0.5)
        self._notify("phase", f"{message}; {_RECOVERY[policy]}")

    def _take(self, step: Step, batch: Batch, sampler_state: dict[str, Any]) -> None:
        """Move to the new θ, log the step, check the held-out tasks when it is time."""
        self.before, self.failures = self.theta, 0
        self.theta, self.state = step.theta, step.state
        self.sampler_state = self._observe(batch, sampler_state)
        self.steps += 1
        self.experiment.oracle.end_step()
        record: dict[str, Any] = {
            "step": self.steps,
            "batch": len(batch.ids),
            "loss": step.loss if len(batch.ids) else None,
            **({} if step.penalty is None else {"penalty": step.penalty}),
            **step.metrics,
            **self.experiment.oracle.certificate,
            **self.experiment.oracle.cost.as_dict(),
        }
        if self.recoveries:
            record["recoveries"] = self.recoveries
        fraction, checks = self._fraction(), self.experiment.recipe.validation.checks
        if fraction >= (self.checks + 1) / checks:
            # At least one more, since fraction * checks may round down to the current check.
            self.checks = max(self.checks + 1, int(fraction * checks))
            if self._check(record):
                noun = "images" if self.experiment.recipe.of_images else "tasks"
                self.ended = f"stopped early: no improvement on the validation {noun}"
        self.history.append(record)
        self._notify("stepped", record, self._seconds(), min(fraction, 1.0))
        self._watch_for_zeros(batch)

    def _observe(self, batch: Batch, sampler_state: dict[str, Any]) -> dict[str, Any]:
        """The state of the sampler once it has seen what the last hypergradient of the step reports."""
        latest = self.experiment.oracle.latest
        if latest is None or not latest.seen:
            return sampler_state
        return self.experiment.sampler.observe(sampler_state, batch, latest.seen)

    def _watch_for_zeros(self, batch: Batch) -> None:
        """Warn when the hypergradient of a step was exactly zero without cause, and stop if that persists."""
        result = self.experiment.oracle.latest
        if result is None or not any(batch.weights) or result.value.value == (result.value.penalty or 0):
            return  # for an empty batch or a loss of zero this is right
        if result.first or self.experiment.oracle.hypergradient.moves_x:
            return  # the first z is zero where x and the adjoint are updated together; `bome` may move x alone
        alone = self._penalty_gradient()
        if any(not torch.equal(entry, alone[name]) for name, entry in result.gradient.items()):
            self.zeros = 0
            return
        self.zeros += 1
        only = result.value.penalty is not None
        sentence = _ZERO.format(effect="only the penalty moves θ" if only else "θ does not move")
        if self.zeros == 1 and self.ranks.first:
            log.warning("step %d: %s", self.steps, sentence)
        if self.zeros >= _ZEROS:
            raise NumericalError(f"steps {self.steps - _ZEROS + 1} to {self.steps}: {sentence}")

    def _penalty_gradient(self) -> dict[str, Tensor]:
        """What the last hypergradient would have been if θ did not affect the solutions."""
        problem, theta = self.experiment.problem, self.before
        _, gradient = penalty_gradient(problem, theta)
        if not gradient:
            return {name: torch.zeros_like(value) for name, value in theta.items()}
        return {name: entry.to(theta[name]) for name, entry in problem.project_gradient(gradient).items()}

    def _check(self, record: dict[str, Any] | None) -> bool:
        """Solve the held-out tasks with the current θ; returns whether patience is exhausted."""
        began = self.ranks.now()
        experiment, settings = self.experiment, self.experiment.recipe.validation
        self.checked_at = self.steps
        metric = experiment.metric
        value = self._measure(experiment.validation)
        test = self._measure(experiment.evaluation) if settings.evaluation else None
        penalty = penalty_at(experiment.problem, self.theta)
        # A metric knows nothing of a penalty, and would choose the most expensive θ: there the newest one is best.
        so_far = math.nan if self.best is None or penalty is not None else self.best[0]
        better = value is not None and metric.better(value, so_far)
        if value is not None:
            if better:
                self.best = value, self.steps, dict(self.theta)
            self.since_best = 0 if better else self.since_best + 1
        check = Check(self.steps, experiment.oracle.cost.computations, metric, value, test, better, penalty)
        if record is not None:
            record |= {name: value for name, value in check.figures().items() if value is not None}
        self._notify("checked", check, self.theta)
        self.checking += self.ranks.now() - began
        return settings.patience is not None and self.since_best >= settings.patience

    def _measure(self, tasks: Tasks | None) -> float | None:
        """The mean of the deciding metric with the current θ; None where it cannot be measured."""
        if tasks is None or not measurable([self.experiment.metric], tasks):
            return None
        return self._solve(self.experiment.problem, self.theta, tasks).mean()

    def _result(self, seconds: float) -> RunResult:
        """Choose θ and evaluate it together with the initial θ and the baseline."""
        experiment = self.experiment
        theta, chosen = self._choose()
        experiment.require_usable(theta, "the run ends with a θ that cannot be used")
        baseline = self._baseline()
        initial = self._evaluate(experiment.theta, "evaluating the initial θ")
        evaluation = self._evaluate(theta, "evaluating the learned θ", keep=_PICTURES)
        return RunResult(
            status=self.ended or BUDGET_SPENT,
            steps=self.steps,
            cost=experiment.oracle.cost,
            interrupted=self.interrupted,
            seconds=seconds,
            model=experiment.model(theta),
            last=self.theta,
            chosen=chosen,
            metric=experiment.metric,
            validation=None if self.best is None else self.best[0],
            evaluation=evaluation,
            initial=initial,
            baseline=baseline,
            history=self.history,
        )

    def _choose(self) -> tuple[dict[str, Tensor], str]:
        penalised = penalty_at(self.experiment.problem, self.theta) is not None
        if self.best is None or self.best[1] == self.steps or penalised:
            return self.theta, "last"
        return self.best[2], f"best (step {self.best[1]})"

    def _baseline(self) -> Evaluation | None:
        experiment = self.experiment
        if experiment.baseline is None or experiment.evaluation is None:
            return None
        problem, theta = experiment.baseline
        self._notify("phase", "tuning the baseline")
        tuned = tune(
            problem,
            theta,
            problem.samples["training"],
            experiment.evaluation_solver,
            metric=experiment.metric,
            stop=self._late,
            **self._options(),
        )
        experiment.oracle.charge(Cost(evaluation_iterations=tuned.iterations))
        if not tuned.complete:
            result = f"the best of its {tuned.trials} trials is used" if tuned.trials else "it is left out"
            self._notify("phase", f"budget.seconds was spent before the baseline was tuned; {result}")
        if not tuned.trials:
            return None
        tasks = VariationalTasks(problem, problem.samples["evaluation"])
        return self._solve(problem, tuned.theta, tasks, keep=_PICTURES, every=True)

    def _late(self) -> bool:
        """Whether the seconds of the budget are spent, those reserved for the baseline included."""
        limit = self.experiment.recipe.budget.seconds
        return limit is not None and self.ranks.now() - self.began >= limit

    def _evaluate(self, theta: Theta, sentence: str, keep: int = 0) -> Evaluation | None:
        if self.experiment.evaluation is None:
            return None
        self._notify("phase", sentence)
        return self._solve(self.experiment.problem, theta, self.experiment.evaluation, keep, every=True)

    def _solve(
        self, problem: Problem, theta: Theta, tasks: Tasks, keep: int = 0, every: bool = False
    ) -> Evaluation:
        """Solve and measure: the deciding metric, and with ``every`` all others of the problem as well."""
        oracle, name = self.experiment.oracle, self.experiment.metric.name
        names = (name, *problem.metrics) if every else (name,)
        solver = self.experiment.evaluation_solver
        evaluation = evaluate_tasks(
            problem, theta, tasks, solver, keep=keep, metrics=names, **self._options()
        )
        oracle.charge(Cost(evaluation_iterations=evaluation.iterations))
        return evaluation

    def _options(self) -> dict[str, Any]:
        recipe = self.experiment.recipe
        return {
            "tol": recipe.evaluation_tol,
            "chunk": self.experiment.oracle.chunk,
            "limit": recipe.iteration_limit,
            "ranks": self.ranks,
        }

    def _fraction(self) -> float:
        """The fraction of the training budget that is used."""
        budget, cost = self.experiment.recipe.budget, self.experiment.oracle.cost
        tuned = self.experiment.baseline is not None and self.experiment.evaluation is not None
        seconds = budget.seconds and budget.seconds * (1 - _BASELINE * tuned)
        spent = {
            "computations": cost.computations,
            "steps": self.steps,
            "seconds": self._seconds() + self.checking,
        }
        return used(asdict(budget) | {"seconds": seconds}, spent)

    def _seconds(self) -> float:
        """Time spent on training."""
        return self.ranks.now() - self.began - self.checking

    def _stop_when_spent(self, cost: Cost) -> None:
        if self._fraction() >= 1:
            raise BudgetExhausted("the budget is spent")

    def _checkpoint_if_due(self) -> None:
        if self.keeper is not None and self.keeper.due():
            self._checkpoint()

    def _checkpoint(self) -> None:
        if self.keeper is not None:
            self.keeper.keep(self.snapshot())

    def _notify(self, event: str, *details: Any) -> None:
        try:
            for listener in self.listeners if self.ranks.first else ():
                getattr(listener, event)(*details)
        except OSError:
            self.unwritten = True
            raise


def _on(device: torch.device, content: Any) -> Any:
    """Plain data of a checkpoint with its tensors, at any depth, back on their device."""
    if isinstance(content, Tensor):
        return content.to(device)
    if isinstance(content, Mapping):
        return {name: _on(device, value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(_on(device, value) for value in content)
    return content
