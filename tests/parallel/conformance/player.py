"""Random actions of a user on a module under a wrapper, and the values that the user sees."""

import contextlib
import copy

import torch
import torch.distributed as dist
from tests.parallel.conformance.networks import Net
from tests.parallel.conformance.training import FailedError, Setup, Training, batch, whole
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

LATE = "head."  # parameters that may be added to the optimizer later


class Player:
    """Plays actions on a module under a wrapper. An action is a method's name with its arguments."""

    def __init__(self, setup: Setup, *, tied: bool, late: bool):
        """tied: two blocks share a matrix. late: the optimizer gets the head's parameters later."""
        network = Net()
        if tied:
            network.blocks[2].linear.weight = network.blocks[0].linear.weight
        self.late = {n for n, _ in network.named_parameters() if late and n.startswith(LATE)}
        self.t = Training(setup, network, groups=self._groups)
        self.setup = setup
        self.average = self.schedule = None
        self.losses: list[torch.Tensor] = []
        self.is_unreduced = False  # True if no_sync has left gradients to average
        self.seen: dict[str, torch.Tensor] = {}
        self.saved = None

    def _groups(self, module):
        return [{"params": [p for n, p in module.named_parameters() if n not in self.late]}]

    def play(self, actions) -> dict[str, torch.Tensor]:
        for name, *arguments in actions:
            getattr(self, name)(*arguments)
        self.norm()
        return self.seen | self.t.results()

    def forward(self, step, blocks, expert):
        losses = [
            self.t.loss(
                step, rank, blocks=blocks, expert=rank % 2 if expert == "by rank" else expert
            )
            for rank in self.setup.batches
        ]
        self.losses.append(sum(losses) / len(losses))

    def backward(self):
        if self.losses:
            self.losses.pop(0).backward()
            self.is_unreduced = False

    def backward_under_no_sync(self):
        """The gradients are not means until the next backward outside of no_sync."""
        if self.losses:
            with self.t.parallel.no_sync():
                self.backward()
            self.is_unreduced = True

    def _average(self):
        if self.is_unreduced:
            self.skip()
            self.forward(90, (0, 1, 2), None)
            self.backward()

    def fail_in_backward(self, index, zeroes):
        self.t.backward_that_fails(70, index)
        if zeroes:
            self.zero_grad_of_the_module()
        self.is_unreduced = False

    def fail_in_forward(self, index):
        def fail(*_):
            raise FailedError

        handle = self.t.inner.blocks[index].register_forward_pre_hook(fail)
        with contextlib.suppress(FailedError):
            self.forward(80, (0, 1, 2), None)
        handle.remove()

    def skip(self):
        self.losses.clear()

    def zero_grad(self, set_to_none):
        self.t.optimizer.zero_grad(set_to_none=set_to_none)

    def zero_grad_of_the_module(self):
        self.t.module.zero_grad()

    def step(self):
        self._average()
        self.skip()
        self.t.step()

    def clip(self, max_norm):
        self._average()
        self._see("clipped", self.t.parallel.clip_gradients(max_norm))

    def norm(self):
        self._average()
        self._see("norm", self.t.gradient_norm())

    def scale_gradients(self, factor):
        for parameter in self.t.inner.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def drop_gradient(self, name):
        self.t.parameter(name).grad = None

    def freeze(self, name):
        self.t.parameter(name).requires_grad_(False)

    def unfreeze(self, name):
        self.t.parameter(name).requires_grad_()

    def write(self, name, factor):
        self.skip()
        with torch.no_grad():
            self.t.parameter(name).mul_(factor)

    def evaluate(self, step):
        with torch.no_grad():
            self._see("evaluated", self.t.loss(step, 0))

    def copy(self):
        """A deep copy computes with the weights that the original had."""
        other = copy.deepcopy(self.t.module)
        with torch.no_grad():
            self._see("copied", other(torch.ones(2, 6, dtype=torch.float64)))

    def save(self):
        """All ranks keep the state of rank 0."""
        state = [copy.deepcopy(self.t.parallel.state())]
        if self.setup.wrapper != "none":
            dist.broadcast_object_list(state, group=self.setup.group, group_src=0)
        self.saved = state[0]

    def load(self):
        if self.saved is not None:
            self.skip()
            self.t.parallel.load(copy.deepcopy(self.saved))

    def accumulate(self, steps, name):
        """Accumulates micro-batches; the last backward averages. The named parameter, if any, is frozen
        after the first.
        """
        self.skip()
        self.zero_grad(True)
        for number, step in enumerate(steps):
            self.forward(step, (0, 1, 2), None)
            if number == len(steps) - 1:
                self.backward()
            else:
                self.backward_under_no_sync()
            if name and not number:
                was_trained = self.t.parameter(name).requires_grad
                self.freeze(name)
        if name and was_trained:
            self.unfreeze(name)

    def scaled_step(self, step, is_infinite):
        """Steps with a loss scale. If one rank's loss is infinite, no rank steps."""
        self.skip()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.zero_grad(True)

        def loss(step, rank):
            blown = float("inf") if is_infinite and rank == 1 else 1.0
            return scaler.scale(self.t.loss(step, rank)) * blown

        self.t.backward(step, loss)
        self.is_unreduced = False
        scaler.step(self.t.optimizer)
        scaler.update()
        self.zero_grad(True)
        self._see("scale", torch.tensor(scaler.get_scale()))

    def average_weights(self):
        """Updates an exponential moving average of the weights and computes with it."""
        if self.average is None:
            self.average = AveragedModel(self.t.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.average.update_parameters(self.t.module)
        with torch.no_grad():
            self._see("average", self.average(batch(3, 0)))

    def differentiate_by_input(self, step):
        x = batch(step, 0).requires_grad_()
        (gradient,) = torch.autograd.grad(self.t.module(x).square().mean(), x)
        self._see("by input", gradient)

    def differentiate_by_weights(self, step, name):
        """Each rank gets the gradients of its own loss, and `.grad` does not change."""
        if self.t.parameter(name).requires_grad:
            loss = self.t.loss(step, 0)
            self._see("by weight", torch.autograd.grad(loss, self.t.parameter(name))[0])

    def call_with_others(self, factor):
        """Calls the module with other weights by torch.func.functional_call."""
        others = {n: p.detach() * factor for n, p in self.t.inner.named_parameters()}
        with torch.no_grad():
            self._see("with others", torch.func.functional_call(self.t.inner, others, batch(4, 0)))

    def add_group(self):
        late, self.late = self.late, set()
        if late:
            parameters = [self.t.parameter(name) for name in sorted(late)]
            self.t.optimizer.add_param_group({"params": parameters, "lr": 0.05})

    def edit_state(self, factor):
        for values in self.t.optimizer.state.values():
            if values.get("momentum_buffer") is not None:
                values["momentum_buffer"].mul_(factor)

    def reset_state(self):
        self.t.optimizer.state.clear()

    def change_rate(self):
        if self.schedule is None:
            self.schedule = StepLR(self.t.optimizer, 1, gamma=0.7)
        else:
            self.schedule.step()

    def load_weights(self, name, assign):
        """Loads a new value of one parameter into the module."""
        self.skip()
        loaded = whole(self.t.parameter(name)) * 0.8
        self.t.inner.load_state_dict({name: loaded}, strict=False, assign=assign)

    def to_and_back(self):
        self._average()  # rounding the ranks' own gradients would differ from rounding the mean
        self.skip()
        self.t.module.to(torch.float32)
        self.t.module.to(torch.float64)

    def hook(self, name, factor):
        parameter = self.t.parameter(name)
        was_trained = parameter.requires_grad
        parameter.requires_grad_().register_hook(lambda gradient: gradient * factor)
        parameter.requires_grad_(was_trained)

    def _see(self, what, value):
        self.seen[f"{len(self.seen)} {what}"] = whole(value)
