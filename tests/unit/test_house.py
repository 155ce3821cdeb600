"""The house stays as it was decided: functions on a screen, files in one sitting, and torch's private
parts in named files alone, each for one reason (CONTRIBUTING.md).
"""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src/stepgauge"
MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FILE = 40, 400
MOST_LINES_OF_A_GUIDE = 120  # two screens; that of conformance is a table which its test writes
DEVICE_CODE = ("triton.jit", "gluon.jit")
# File -> what of torch's private parts it needs. Each says there what would make it unnecessary.
PRIVATE_TORCH = {
    "runtime/recording.py": "the end of a capture that failed, in the allocator",
    "kernels/launch/__init__.py": "the handle of the current stream without an object around it",
    "kernels/plain_eager.py": "whether a dispatch mode or a transform is active",
    "measure/memory/autograd_engine.py": "the node that runs, and references of a storage",
    "parallel/data_parallel/bucket_gradients.py": "references of a storage",
    "parallel/autograd/running_backward.py": "which parameters the running backward reaches",
    "parallel/communication/copied_all_to_all.py": "work that wait_tensor waits for",
    "parallel/communication/graph_collectives.py": "collectives without Python formulas of autograd",
    "parallel/fsdp/unsharded_unit.py": "a version for weights that are not there",
    "parallel/shares.py": "a tensor's class without its __torch_function__",
}
# What else is private in torch, the files that need it, and what would make it unnecessary.
PRIVATE_NAMES = {
    "torch._VF": ({"measure/memory/recurrent.py"}, "fake kernels for cuDNN's LSTM and GRU"),
    "torch._assert_async": (
        {"parallel/tensor_parallel/vocabulary_loss.py"},
        "a public assertion on a device",
    ),
    "torch._chunk_cat": ({"parallel/fsdp/flat_gradients.py"}, "a public name of it"),
    "torch._foreach_add_": (
        {"parallel/pipeline/split.py"},
        "a public name of the foreach functions",
    ),
    "torch._foreach_copy_": (
        {"parallel/fsdp/flat_gradients.py", "parallel/fsdp/unsharded_unit.py"},
        "a public name of the foreach functions",
    ),
    "torch._foreach_mul_": ({"parallel/whole_norm.py"}, "a public name of the foreach functions"),
    "torch._foreach_zero_": (
        {"parallel/pipeline/graphed.py"},
        "a public name of the foreach functions",
    ),
    "torch._foreach_norm": (
        {"parallel/shares.py", "parallel/whole_norm.py"},
        "a public name of the foreach functions",
    ),
    "torch._dynamo": (
        {"parallel/pipeline/split.py"},
        "a compiler that counts calls under checkpoints without a setting",
    ),
    "torch._functorch": (
        {"bench/kernels/operation.py", "measure/memory/compiled.py"},
        "donated buffers and the partitioner as options of torch.compile",
    ),
    "torch._inductor": (
        {"measure/memory/compiled.py", "parallel/communication/copied_all_to_all.py"},
        "the partitioner as an option of compile, and a tag for collectives",
    ),
    "torch._subclasses": (
        {
            "kernels/linear_cross_entropy/__init__.py",
            "measure/memory/fake_device.py",
            "models/drawing.py",
        },
        "a public name of FakeTensor and FunctionalTensor",
    ),
    "torch.autograd.Variable._execution_engine": (
        {"parallel/autograd/running_backward.py"},
        "a public callback at the end of a backward",
    ),
    "torch.autograd._get_sequence_nr": (
        {"measure/memory/autograd_engine.py"},
        "a public number of a forward operation",
    ),
    "torch.cuda.memory._record_memory_history": (
        {"measure/memory/history.py"},
        "none needed: documented so",
    ),
    "torch.cuda.memory._snapshot": ({"measure/memory/history.py"}, "none needed: documented so"),
    "torch.distributed._symmetric_memory": (
        {"parallel/communication/peer_memory.py"},
        "a public name of symmetric memory",
    ),
    "torch.distributed.checkpoint.default_planner._EmptyStateDictLoadPlanner": (
        {"train/checkpoint.py"},
        "loading a checkpoint without knowing its names",
    ),
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict": (
        {"train/checkpoint.py"},
        "loading a checkpoint without knowing its names",
    ),
    "torch.distributed.distributed_c10d._abort_process_group": (
        {"runtime/world.py"},
        "a public abort of a group",
    ),
    "torch.distributed.distributed_c10d._coalescing_manager": (
        {"parallel/communication/collectives.py"},
        "a public launch of several collectives at once",
    ),
    "torch.distributed.distributed_c10d._world": (
        {"parallel/communication/collectives.py"},
        "a public list of a process's groups",
    ),
    "torch.ops._c10d_functional": (
        {"parallel/communication/graph_collectives.py"},
        "public functional collectives that the compiler keeps in its graphs",
    ),
    "torch.ops.aten._scaled_dot_product_cudnn_attention": (
        {"kernels/attention/cudnn.py"},
        "a public cuDNN attention that gives and takes the log-sum-exp",
    ),
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": (
        {"kernels/attention/cudnn.py"},
        "a public cuDNN attention that gives and takes the log-sum-exp",
    ),
    "torch.profiler._ExperimentalConfig": (
        {"measure/profiler.py"},
        "stacks by a public option of the profiler",
    ),
    "torch.testing._internal": (
        {"runtime/imagined_world.py"},
        "a public backend whose ranks need not be there",
    ),
    "torch.utils._python_dispatch": (
        {
            "measure/memory/autograd_engine.py",
            "measure/memory/fake_device.py",
            "measure/memory/storage_tracker.py",
            "measure/operators.py",
        },
        "a public name of TorchDispatchMode",
    ),
    "torch.utils._pytree": (
        {
            "api/measure.py",
            "bench/storage_tracking.py",
            "bench/user_file.py",
            "measure/footprint.py",
            "measure/memory/storage_tracker.py",
            "parallel/fsdp/sharded_unit.py",
            "parallel/tensor_parallel/partial_gradients.py",
            "train/user_model.py",
        },
        "a public name of pytrees",
    ),
}

# Private members of torch's objects, by name: which files ask for them, and the way out.
HOOKS = "a public question whether a tensor has hooks"
FORWARD_HOOKS = "a public way to give a module's forward hooks to the one that replaces it"
PRIVATE_MEMBERS = {
    "_backward_hooks": ({"parallel/autograd/parameter_hooks.py"}, HOOKS),
    "_post_accumulate_grad_hooks": ({"parallel/autograd/parameter_hooks.py"}, HOOKS),
    "_forward_hooks": ({"parallel/autograd/parameter_hooks.py"}, FORWARD_HOOKS),
    "_forward_hooks_with_kwargs": ({"parallel/autograd/parameter_hooks.py"}, FORWARD_HOOKS),
    "_forward_hooks_always_called": ({"parallel/autograd/parameter_hooks.py"}, FORWARD_HOOKS),
    "_CollectiveKernel": (
        {"parallel/communication/copied_all_to_all.py"},
        "a public tag for collectives",
    ),
    "_cdata": (
        {
            "measure/memory/autograd_engine.py",
            "measure/operators.py",
            "parallel/data_parallel/bucket_gradients.py",
        },
        "a public number of a storage that has no address",
    ),
    "_device_types": (
        {"parallel/communication/collectives.py"},
        "a public list of a group's backends",
    ),
    "_flat_weights": ({"parallel/fsdp/sharded_unit.py"}, "an RNN that reads its own parameters"),
    "_flat_weights_names": (
        {"parallel/fsdp/sharded_unit.py"},
        "an RNN that reads its own parameters",
    ),
    "_local_tensor": ({"parallel/sharding.py"}, "a to_local that makes no view"),
    "_get_backend": (
        {"parallel/communication/collectives.py", "parallel/communication/reducer.py"},
        "a public name of a group's backend on a device",
    ),
    "_indices": (
        {"measure/memory/missing_rules.py", "measure/memory/storage_tracker.py"},
        "indices of a sparse tensor that is not coalesced",
    ),
    "_schema": (
        {"measure/memory/workspaces.py", "measure/operators.py"},
        "a public schema of an operator",
    ),
    "_sequence_nr": (
        {"measure/memory/autograd_engine.py"},
        "a public number of a forward operation",
    ),
    "_use_count": ({"measure/memory/autograd_engine.py"}, "a public count of a tensor's users"),
}
# Private members of others: the standard library's, and FlashAttention-4's own functions.
NOT_OF_TORCH = {"_exit", "_getframe", "_replace", "_flash_attn_fwd", "_flash_attn_bwd"}
NOT_OF_TORCH |= {"_forkserver", "_forkserver_pid"}  # multiprocessing's; runtime/fork_server.py


def sources(*endings):
    return [path for path in sorted(SOURCE.rglob("*")) if path.suffix in endings]


def name(path):
    return path.relative_to(SOURCE).as_posix()


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(body):
    """Of a module and its classes; what stands in a function counts with it."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body)
        elif isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any(decorator.startswith(DEVICE_CODE) for decorator in decorators):
                yield node


def lines_of(path, function):
    """Of a command without its signature, which declares its options."""
    is_command = name(path).startswith("cli/")
    start = function.body[0].lineno if is_command else function.lineno
    return function.end_lineno - start + 1


def test_a_function_fits_a_screen():
    long = {
        f"{name(path)}: {node.name}": lines
        for path in sources(".py")
        for node in functions(tree_of(path).body)
        if (lines := lines_of(path, node)) > MOST_LINES_OF_A_FUNCTION
    }
    assert long == {}


def test_a_file_is_read_in_one_sitting():
    lengths = {
        name(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(".py", ".cpp", ".h", ".js")
    }
    assert {n: lines for n, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE} == {}


def test_a_guide_fits_two_screens():
    guides = [p for p in (SOURCE.parents[1] / "docs").glob("*.md") if p.stem != "conformance"]
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in guides}
    assert {n: lines for n, lines in lengths.items() if lines > MOST_LINES_OF_A_GUIDE} == {}


def test_a_folders_reading_order_names_each_of_its_files():
    ordered = [
        path for path in sources(".py") if "in the order in which to read" in path.read_text()
    ]
    assert ordered
    for path in ordered:
        files = {each.stem for each in path.parent.glob("*.py")} - {"__init__"}
        assert files <= set(re.findall(r"`(\w+)`", path.read_text())), path


def test_every_file_that_is_no_module_is_packaged():
    """Else what is installed from a wheel misses it."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = {
        name(path)
        for package, patterns in project["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (SOURCE.parent / package.replace(".", "/")).glob(pattern)
    }
    others = {
        name(path)
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert packaged == others


def test_private_torch_stays_where_it_is_explained():
    used = {
        name(path)
        for path in sources(".py")
        if re.search(r"\btorch\._C\b", path.read_text("utf-8"))
    }
    assert used == set(PRIVATE_TORCH)


def private_names(path):
    """Of torch, each up to its first part with an underscore; torch._C has its own table."""
    nodes = list(ast.walk(tree_of(path)))
    names, known = [], {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
            known |= {each.asname or "torch": each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            full = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            names += full.values()
            known |= full
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # for sys.modules
            names += re.findall(r"^torch[.\w]+$", node.value)
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            names.append(".".join([known.get(node.id, node.id), *reversed(parts)]))
    found = (re.match(r"torch(?:\.[a-zA-Z]\w*)*\._[a-zA-Z]\w*", each) for each in names)
    return {match[0] for match in found if match} - {"torch._C"}


def test_other_private_parts_of_torch_stand_in_the_files_that_are_named():
    unnamed, unused = [], set(PRIVATE_NAMES)
    for path in sources(".py"):
        for private in private_names(path):
            files, _ = PRIVATE_NAMES.get(private, (set(), ""))
            unused.discard(private)
            if name(path) not in files:
                unnamed.append(f"{name(path)} uses {private}")
    assert not unnamed
    assert not unused


def own_names():
    """Everything that this package gives a name."""
    found = set()
    for path in sources(".py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def test_private_members_of_torchs_objects_are_asked_for_in_the_files_that_are_named():
    """Names that this package defines as well are not seen."""
    of_modules = {private.rpartition(".")[2] for private in PRIVATE_NAMES}  # another test has these
    known, found = own_names() | NOT_OF_TORCH | of_modules, {}
    for path in sources(".py"):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Attribute) or not re.match("_[a-zA-Z]", node.attr):
                continue
            of_module = re.match(r"(torch|dist|aten)\b", ast.unparse(node.value))
            if node.attr not in known and not of_module:
                found.setdefault(node.attr, set()).add(name(path))
    assert found == {member: files for member, (files, _) in PRIVATE_MEMBERS.items()}


def names_in(module):
    """Everything that a module of ours defines, imports or, as a package, holds."""
    package = SOURCE.parent / module.replace(".", "/")
    path = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
    found = {each.stem for each in package.glob("*")}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    if "__getattr__" in found:  # loads names, which stand there as texts, when they are asked for
        texts = (node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant))
        found.update(text for text in texts if isinstance(text, str))
    return found


IMPORT = re.compile(r"from (stepgauge[\w.]*) import (\([^)]*\)|[^\n]*)")


def test_scripts_and_documents_import_what_there_is():
    """Nothing else runs the Python inside shell scripts: a name that was changed would be noticed on
    a GPU.
    """
    root, missing, seen = SOURCE.parents[1], [], 0
    scripts = [*root.glob("benchmarks/**/*.py"), *root.glob("benchmarks/**/*.sh")]
    for path in (
        *scripts,
        *root.glob("examples/**/*.py"),
        *root.glob("*.md"),
        *root.glob("docs/*.md"),
    ):
        for module, names in IMPORT.findall(path.read_text(encoding="utf-8")):
            (node,) = ast.parse(f"from {module} import {names}").body
            seen += 1
            gone = {each.name for each in node.names} - names_in(module)
            missing += [f"{path.name}: {module}.{each}" for each in gone]
    assert not missing
    assert seen > 100


@pytest.mark.parametrize("path", sorted(PRIVATE_TORCH))
def test_private_torch_names_its_way_out(path):
    told = " ".join((SOURCE / path).read_text(encoding="utf-8").split())
    assert re.search(r"[Ww]ay out[:,] \w.{15,}", told), "a sentence that says what takes its place"
