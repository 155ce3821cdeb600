"""What people do with a module under a wrapper, and what they see of it: an action is a method."""

import contextlib
import copy

import torch
import torch.distributed as dist
from tests.parallel.conformance.networks import Net
from tests.parallel.conformance.training import FailedError, Setup, Training, batch, whole
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

LATE = "head."  # parameters that the optimizer may be given later


class Player:
    """Does actions, each a method's name and its arguments, to a module under a wrapper."""

    def __init__(self, setup: Setup, *, tied: bool, late: bool):
        """tied: two blocks have one matrix; late: the optimizer has the head's parameters last."""
        network = Net()
        if tied:
            network.blocks[2].linear.weight = network.blocks[0].linear.weight
        self.late = {n for n, _ in network.named_parameters() if late and n.startswith(LATE)}
        self.t = Training(setup, network, groups=self._groups)
        self.setup = setup
        self.average = self.schedule = None
        self.losses: list[torch.Tensor] = []
        self.is_local = False  # whether gradients are to be averaged yet
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
            self.is_local = False

    def backward_alone(self):
        """Nothing may ask for the mean until the next backward outside."""
        if self.losses:
            with self.t.parallel.no_sync():
                self.backward()
            self.is_local = True

    def _average(self):
        if self.is_local:
            self.skip()
            self.forward(90, (0, 1, 2), None)
            self.backward()

    def fail_in_backward(self, index, zeroes):
        self.t.backward_that_fails(70, index)
        if zeroes:
            self.zero_grad_of_the_module()
        self.is_local = False

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
        """A copy's weights are what the original's were, and it computes."""
        other = copy.deepcopy(self.t.module)
        with torch.no_grad():
            self._see("copied", other(torch.ones(2, 6, dtype=torch.float64)))

    def save(self):
        """Rank 0 writes, and all read."""
        given = [copy.deepcopy(self.t.parallel.state())]
        if self.setup.wrapper != "none":
            dist.broadcast_object_list(given, group=self.setup.group, group_src=0)
        self.saved = given[0]

    def load(self):
        if self.saved is not None:
            self.skip()
            self.t.parallel.load(copy.deepcopy(self.saved))

    def accumulate(self, steps, name):
        """Micro-batches, the last averaged; a parameter, if one is named, is frozen after the first."""
        self.skip()
        self.zero_grad(True)
        for number, step in enumerate(steps):
            self.forward(step, (0, 1, 2), None)
            if number == len(steps) - 1:
                self.backward()
            else:
                self.backward_alone()
            if name and not number:
                was_trained = self.t.parameter(name).requires_grad
                self.freeze(name)
        if name and was_trained:
            self.unfreeze(name)

    def scaled_step(self, step, is_infinite):
        """By a loss scale, with a loss of one rank that may be infinite: then nobody steps."""
        self.skip()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.zero_grad(True)

        def loss(step, rank):
            blown = float("inf") if is_infinite and rank == 1 else 1.0
            return scaler.scale(self.t.loss(step, rank)) * blown

        self.t.backward(step, loss)
        self.is_local = False
        scaler.step(self.t.optimizer)
        scaler.update()
        self.zero_grad(True)
        self._see("scale", torch.tensor(scaler.get_scale()))

    def average_weights(self):
        """Of an exponential moving average, which computes too."""
        if self.average is None:
            self.average = AveragedModel(self.t.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.average.update_parameters(self.t.module)
        with torch.no_grad():
            self._see("average", self.average(batch(3, 0)))

    def differentiate_by_input(self, step):
        given = batch(step, 0).requires_grad_()
        (found,) = torch.autograd.grad(self.t.module(given).square().mean(), given)
        self._see("by input", found)

    def differentiate_by_weights(self, step, name):
        """What each rank finds is its own, and `.grad` stays as it is."""
        if self.t.parameter(name).requires_grad:
            loss = self.t.loss(step, 0)
            self._see("by weight", torch.autograd.grad(loss, self.t.parameter(name))[0])

    def call_with_others(self, factor):
        """torch.func's call, with weights that are not the module's."""
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
        """Of one parameter, into the module."""
        self.skip()
        given = whole(self.t.parameter(name)) * 0.8
        self.t.inner.load_state_dict({name: given}, strict=False, assign=assign)

    def to_and_back(self):
        self._average()  # else each rank rounds a part
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
