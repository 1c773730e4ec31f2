# SPDX-License-Identifier: Apache-2.0
"""Private names of PyTorch, which any of its versions may change: only these modules take some, and
each says what its users would miss."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python" / "syncbn"
TAKERS = {
    "baton": "several devices or shares in one thread: what PyTorch keeps for a thread",
    "devices": "several devices in one thread: whether backward runs",
    "exchange.callers": "groups of torchft, of torchcomms, and those named in a saved model",
    "exchange.connections": "an exchange that does not take the user's group with it",
    "exchange.failing": "a broken exchange, whose group PyTorch would keep",
    "exchange.meeting": "any launcher: the store in which its ranks met",
    "exchange.turn": "ranges in a profile",
    "models.join": "uneven loops under Join",
    "models.recording": "notes of gradients, once per backward",
    "operators": "modes and eager steps of small layers",
    "ops": "foreach copies, and fake tensors in graphs",
    "shares.gradients": "gradients whose memory may be taken, as no other tensor lies there",
    "shares.turns": "outputs of models in any nesting",
    "step.as_operator": "the layer as one operator of a graph",
    "step.autograd": "an eager step that looks for modes and transforms before all else",
    "step.masks": "masks in exported graphs",
    "step.recomputation": "checkpointed segments",
    "step.surroundings": "torch.func, tracers and fake tensors, which get an error or a graph",
    "step.training": "ranges in a profile",
}


def private_names(tree: ast.AST) -> set[str]:
    """The attributes and modules of PyTorch that begin with one underscore. Base classes of its
    layers do, too, and everybody derives from them."""
    found = set()
    torch_names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module.split(".")[0] == "torch" and ".nn." not in node.module:
                torch_names |= {alias.asname or alias.name for alias in node.names}
                taken = [*node.module.split("."), *(alias.name for alias in node.names)]
                found |= {name for name in taken if is_private(name)}
        if isinstance(node, ast.Import):
            torch_names |= {a.asname for a in node.names if a.asname and a.name.startswith("torch")}
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            if text.split(".")[0] in torch_names and ".nn." not in text:
                found.add(node.attr)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_only_these_modules_take_private_names_of_pytorch():
    takers = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if taken := private_names(ast.parse(path.read_text(encoding="utf-8"))):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            takers[name.removesuffix(".__init__")] = sorted(taken)
    unnamed = {name: taken for name, taken in takers.items() if name not in TAKERS}
    assert not unnamed, f"say in TAKERS of {Path(__file__).name} who needs them"
    assert takers.keys() == TAKERS.keys()
