"""Random sequences of what people do, under a wrapper and in one process, until they differ."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.parallel.conformance.networks import Net
from tests.parallel.conformance.training import Setup, Training, whole

WEIGHTS = ("blocks.0.linear.weight", "blocks.1.gain", "head.bias", "embedding.weight")
# what a wrapper says, instead of doing it wrong
REFUSALS = ("take no backward under no_sync", "a backward has failed")

number = st.integers(0, 3)
blocks = st.sampled_from([(0, 1, 2), (0, 2), (1,), (2, 2)])
ACTIONS = st.one_of(
    st.tuples(st.just("backward"), number, blocks),
    st.tuples(st.just("backward"), number, blocks),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("under_no_sync"), number, blocks),
    st.tuples(st.just("by_rank"), number),
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.just("freeze"), st.sampled_from(WEIGHTS), st.booleans()),
    st.tuples(st.just("write"), st.sampled_from(WEIGHTS)),
    st.tuples(st.just("drop_gradient"), st.sampled_from(WEIGHTS)),
    st.tuples(st.just("scale_gradients")),
    st.tuples(st.just("clip")),
    st.tuples(st.just("fail"), number),
    st.tuples(st.just("skip"), number),
    st.tuples(st.just("evaluate"), number),
    st.tuples(st.just("copy")),
    st.tuples(st.just("save")),
    st.tuples(st.just("load")),
)


@dataclasses.dataclass
class Player:
    """One training that is told what to do."""

    training: Training
    saved: dict | None = None
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def play(self, action: tuple) -> None:
        name, *how = action
        getattr(self, name)(*how)

    def backward(self, step, used):
        self.training.backward(step, blocks=used)

    def under_no_sync(self, step, used):
        with self.training.parallel.no_sync():
            self.training.backward(step, blocks=used)

    def by_rank(self, step):
        t = self.training
        t.backward(step, lambda s, rank: t.loss(s, rank, expert=(s + rank) % 2))

    def step(self):
        self.training.step()

    def zero_grad(self, set_to_none):
        self.training.optimizer.zero_grad(set_to_none=set_to_none)

    def freeze(self, name, frozen):
        self.training.parameter(name).requires_grad_(not frozen)

    def write(self, name):
        with torch.no_grad():
            self.training.parameter(name).mul_(0.75)

    def drop_gradient(self, name):
        self.training.parameter(name).grad = None

    def scale_gradients(self):
        for parameter in self.training.inner.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def clip(self):
        self.seen.append(whole(self.training.parallel.clip_gradients(0.05)).double())

    def fail(self, step):
        self.training.backward_that_fails(step)

    def skip(self, step):
        for rank in self.training.setup.batches:
            self.training.loss(step, rank)

    def evaluate(self, step):
        with torch.no_grad():
            self.seen.append(whole(self.training.loss(step, 0)))

    def copy(self):
        other = copy.deepcopy(self.training.module)
        self.seen += [whole(parameter) for parameter in other.parameters()]

    def save(self):
        state = self.training.inner.state_dict()
        self.saved = {name: value.detach().clone() for name, value in state.items()}

    def load(self):
        if self.saved is not None:
            self.training.inner.load_state_dict(self.saved)


def differs(wrapper: str, actions: list[tuple]) -> str:
    """What differs from one process after the actions; empty if nothing does, or if the wrapper
    refuses one.
    """
    alone, wrapped = Player(Training(Setup("none"), Net())), Player(Training(Setup(wrapper), Net()))
    for action in actions:
        alone.play(action)
        try:
            wrapped.play(action)
        except RuntimeError as error:
            if any(words in str(error) for words in REFUSALS):
                return ""
            raise
    expected, found = alone.training.results(), wrapped.training.results()
    for name, weight in expected.items():
        if not torch.allclose(found[name], weight, rtol=1e-8, atol=1e-8):
            return f"{name} is off by {(found[name] - weight).abs().max():.2g}"
    for place, (ours, theirs) in enumerate(zip(wrapped.seen, alone.seen, strict=True)):
        if not torch.allclose(ours, theirs, rtol=1e-8, atol=1e-8):
            return f"what is seen at place {place} differs"
    if wrapper != "zero2":
        gradients = dict(wrapped.training.inner.named_parameters())
        for name, parameter in alone.training.inner.named_parameters():
            if (parameter.grad is None) != (gradients[name].grad is None):
                return f"{name}.grad is None in one and not in the other"
    return ""


def search(wrappers: list[str], examples: int, start: int = 0) -> dict[str, str]:
    """Of each wrapper the shortest sequence that was found to differ. Runs on every rank, each
    drawing the same sequences.
    """
    torch.set_num_threads(1)
    found = {}
    for wrapper in wrappers:
        found[wrapper] = ""
        try:
            with contextlib.redirect_stdout(None):
                _equals_one_process(wrapper, examples, start)()
        except AssertionError as error:
            found[wrapper] = str(error)
    return found


def _equals_one_process(wrapper: str, examples: int, start: int) -> Callable[[], None]:
    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(ACTIONS, min_size=3, max_size=12))
    def equals_one_process(actions):
        everyones: list = [None] * dist.get_world_size()
        try:
            found = differs(wrapper, actions)
        except Exception as error:
            found = f"raises {error!r}"
        dist.all_gather_object(everyones, found)
        if worst := max(everyones, key=len):
            raise AssertionError(f"{actions}: {worst}")

    return equals_one_process
