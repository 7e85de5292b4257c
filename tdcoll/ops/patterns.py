# SPDX-License-Identifier: Apache-2.0
"""Matmuls beside collectives in a graph, and the operators that replace both.

::

    linear(all_gather(x), weight)       -> all_gather_matmul
    reduce_scatter(linear(x, weight))   -> matmul_reduce_scatter
    all_reduce(linear(x, weight))       -> matmul_all_reduce

Collectives are tdcoll's operators or PyTorch's functional collectives, as DTensor calls them, over
the first dimension and by a sum. Between a collective and a matmul there may be views that keep the
last dimension. Graphs are Dynamo's, or those of aten operators that Inductor gets.

If DTensor gathers or scatters another dimension, such as the sequence of ``[batch, sequence,
hidden]``, it *moves* the ranks' parts between the first dimension and that one, by a split and a
concatenation. A matmul keeps rows apart, so the move changes places with it::

    linear(move(all_gather(x)))          = move(all_gather_matmul(x))
    reduce_scatter(move(linear(x)))      = matmul_reduce_scatter(move(x))
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from tdcoll.fused.matmul.operation import RESULTS
from tdcoll.ops.fusion_report import FusionReport, LeftAsItIs
from tdcoll.ops.matmuls import can_multiply

_tdcoll = torch.ops.tdcoll
_aten = torch.ops.aten

_LINEARS = (torch.nn.functional.linear, _aten.linear.default)
_PRODUCTS = (torch.matmul, torch.mm, operator.matmul, _aten.mm.default, _aten.matmul.default)
_TRANSPOSES = (torch.t, _aten.t.default)
_PERMUTES = (_aten.permute.default, torch.permute)
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, torch.reshape)
_METHODS = (("call_method", "view"), ("call_method", "reshape"))
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)
_HARMLESS = (operator.getitem,)

_REDUCTIONS = {
    "reduce_scatter": _tdcoll.matmul_reduce_scatter.default,
    "all_reduce": _tdcoll.matmul_all_reduce.default,
}


class _Collective(NamedTuple):
    """A collective in a graph.

    Attributes:
        result: The node whose value is the result: of a functional collective, the one that waits.
        source: The node of what it is given.
        group: The name of the group.
        nodes: Its own nodes.
    """

    result: fx.Node
    source: fx.Node
    group: str
    nodes: tuple[fx.Node, ...]


class _Product(NamedTuple):
    """A matmul in a graph.

    Attributes:
        x, weight: Operands.
        bias: Or None.
        depth_first: The weight is ``[depth, columns]``.
        nodes: Its own nodes, a transpose of the weight included.
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    depth_first: bool
    nodes: tuple[fx.Node, ...]


class _Move(NamedTuple):
    """A split into equal parts along one dimension and their concatenation along another.

    Attributes:
        source: The node of what is split.
        parts: Number of parts.
        split_dim, cat_dim: The dimensions, neither of which is the last one.
        nodes: Its own nodes, the last one first.
    """

    source: fx.Node
    parts: int
    split_dim: int
    cat_dim: int
    nodes: tuple[fx.Node, ...]

    def of(self, graph: fx.Graph, value: fx.Node) -> fx.Node:
        """Return the same move of another value, which differs in the last dimension only."""
        example = seen(self.source)
        assert example is not None
        size = example.shape[self.split_dim] // self.parts
        split = graph.call_function(_aten.split.Tensor, (value, size, self.split_dim))
        parts = [graph.call_function(operator.getitem, (split, i)) for i in range(self.parts)]
        return graph.call_function(_aten.cat.default, (parts, self.cat_dim))


def seen(node: Any) -> torch.Tensor | None:
    """Return the example that the graph has of a node's value; None if that is no tensor."""
    value = (
        node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None
    )
    return value if isinstance(value, torch.Tensor) else None


def _is_call(node: Any, targets: tuple[Any, ...]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _targets(name: str) -> tuple[Any, ...]:
    """Return an operator of tdcoll's, with and without its overload."""
    packet = getattr(_tdcoll, name)
    return packet, packet.default


def _collective(node: Any, kind: str) -> _Collective | None:
    """Return the collective whose result a node is, if it is of this kind and a sum."""
    if _is_call(node, _targets(kind)) and not node.kwargs:
        source, *rest = node.args
        op = "sum"
        if kind != "all_gather" and rest:
            op, *rest = rest
        if op != "sum":
            return None
        return _Collective(node, source, rest[0] if rest else "", (node,))
    functional = torch.ops._c10d_functional
    if not _is_call(node, (functional.wait_tensor.default, functional.wait_tensor)):
        return None
    start = node.args[0]
    names = {
        "all_gather": functional.all_gather_into_tensor,
        "reduce_scatter": functional.reduce_scatter_tensor,
        "all_reduce": functional.all_reduce,
    }
    packet = names[kind]
    if not _is_call(start, (packet, packet.default)) or start.kwargs or len(start.users) != 1:
        return None
    source, *rest = start.args
    group = rest.pop()
    if kind != "all_gather" and rest[0] != "sum":
        return None
    return _Collective(node, source, group, (start, node))


def _through_views(node: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """Return what a node is a view of, all of whose last dimension stays, and the views."""
    views: list[fx.Node] = []
    while _is_call(node, _VIEWS) or (
        isinstance(node, fx.Node) and (node.op, node.target) in _METHODS
    ):
        before = seen(node.args[0])
        after = seen(node)
        if before is None or after is None or before.dim() < 2 or after.dim() < 2:
            break
        if before.shape[-1] != after.shape[-1]:
            break
        views.append(node)
        node = node.args[0]
    return node, tuple(views)


def _move(node: Any) -> _Move | None:
    """Return the move that a node is the result of."""
    if not _is_call(node, (_aten.cat.default,)) or node.kwargs:
        return None
    parts, *dimension = node.args
    cat_dim = dimension[0] if dimension else 0
    if not parts or not all(_is_call(part, (operator.getitem,)) for part in parts):
        return None
    split = parts[0].args[0]
    if not _is_call(split, _SPLITS) or split.kwargs:
        return None
    if [part.args for part in parts] != [(split, i) for i in range(len(parts))]:
        return None
    split_dim = split.args[2] if len(split.args) > 2 else 0
    whole = seen(split.args[0])
    examples = [seen(part) for part in parts]
    if whole is None or any(example is None for example in examples):
        return None
    sizes = [example.shape[split_dim] for example in examples if example is not None]
    last = whole.dim() - 1
    if len(set(sizes)) != 1 or sum(sizes) != whole.shape[split_dim]:
        return None
    if not (0 <= split_dim < last and 0 <= cat_dim < last and split_dim != cat_dim):
        return None
    return _Move(split.args[0], len(parts), split_dim, cat_dim, (node, *reversed(parts), split))


def _transposed(node: Any) -> fx.Node | None:
    """Return the matrix whose transpose a node is; None if it is none."""
    if _is_call(node, _TRANSPOSES) or (
        isinstance(node, fx.Node) and (node.op, node.target) == ("call_method", "t")
    ):
        matrix: fx.Node = node.args[0]
        return matrix
    if _is_call(node, _PERMUTES) and list(node.args[1]) == [1, 0]:
        permuted: fx.Node = node.args[0]
        return permuted
    return None


def _product(node: fx.Node) -> _Product | None:
    """Return the matmul that a node is."""
    if _is_call(node, _LINEARS):
        named: dict[str, Any] = dict(zip(("input", "weight", "bias"), node.args, strict=False))
        named |= node.kwargs
        return _Product(named["input"], named["weight"], named.get("bias"), False, (node,))
    if not _is_call(node, _PRODUCTS) or node.kwargs:
        return None
    operands: tuple[Any, ...] = node.args
    weight = operands[1]
    stored = _transposed(weight)
    if stored is None:
        return _Product(operands[0], weight, None, True, (node,))
    return _Product(operands[0], stored, None, False, (node, weight))


def _check_operands(product: _Product) -> None:
    """Raise unless the operators take a matmul's operands."""
    x, weight = seen(product.x), seen(product.weight)
    if x is None or weight is None:
        raise LeftAsItIs("the graph has no example of the matmul's operands")
    if x.dtype not in RESULTS or weight.dtype != x.dtype:
        raise LeftAsItIs(f"operands are of {x.dtype} and {weight.dtype}")
    sizes = [*x.shape, *weight.shape]
    if weight.dim() != 2 or x.dim() < 2 or not all(isinstance(size, int) for size in sizes):
        raise LeftAsItIs(f"operands have shapes {list(x.shape)} and {list(weight.shape)}")
    depth = x.shape[-1]
    columns = weight.shape[1 if product.depth_first else 0]
    if not can_multiply(x.itemsize, depth, columns, product.depth_first):
        raise LeftAsItIs(f"kernels take no rows of {depth} and {columns} elements")


def _nothing_between(first: fx.Node, last: fx.Node, own: set[fx.Node]) -> bool:
    """Return whether nothing is computed between two nodes but what belongs to the pattern, because
    it might write in place. Transposes write nothing."""
    node = first.next
    while node is not last:
        computes = node.op.startswith("call") and node not in own
        if computes and _transposed(node) is None and not _is_call(node, _HARMLESS):
            return False
        if node.op == "root":
            return False
        node = node.next
    return True


def _viewed(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    """Return ``value`` with the shape of another node's."""
    example = seen(like)
    assert example is not None
    made = graph.call_function(_aten.reshape.default, (value, list(example.shape)))
    made.meta = dict(like.meta)
    return made


def _replace(old: fx.Node, new: fx.Node, own: tuple[fx.Node, ...]) -> None:
    """Use another node instead, and erase those that then have no use, the last first."""
    old.replace_all_uses_with(new)
    for node in own:
        if not node.users:
            old.graph.erase_node(node)


def _fuse_gather(node: fx.Node, functional: bool) -> bool:
    """Replace a matmul of gathered rows."""
    product = _product(node)
    if product is None:
        return False
    source, views = _through_views(product.x)
    move = _move(source) if functional else None
    if move is not None:
        source = move.source
        views = (*views, *move.nodes)
    gather = _collective(source, "all_gather")
    if gather is None:
        return False
    _check_operands(product)
    shard = seen(gather.source)
    if shard is None or shard.dim() < 2:
        raise LeftAsItIs("what is gathered has no rows")
    own = (*product.nodes, *views, *reversed(gather.nodes))
    if not functional and not _nothing_between(gather.nodes[0], node, set(own)):
        raise LeftAsItIs("something else is computed between the all-gather and the matmul")
    # If all operands are there when the rows are gathered, later uses of these needn't gather.
    place = node
    if functional and _stand_before((product.weight, product.bias), gather.result):
        place = gather.result.next
    if move is not None and (place is node or not _is_of_ranks(move, gather)):
        raise LeftAsItIs("the gathered parts are moved in another way than DTensor does")
    graph = node.graph
    kept = any(user not in (*views, node) for user in gather.result.users) or any(
        user not in own for view in views for user in view.users
    )
    with graph.inserting_before(place):
        arguments = (
            gather.source,
            product.weight,
            product.bias,
            product.depth_first,
            kept,
            gather.group,
        )
        both = graph.call_function(_tdcoll.all_gather_matmul.default, arguments)
        result = graph.call_function(operator.getitem, (both, 0))
        gathered = graph.call_function(operator.getitem, (both, 1)) if kept else None
        made = _viewed(graph, result if move is None else move.of(graph, result), node)
        if gathered is not None:
            # Earlier uses keep the all-gather; later ones take what the operator has gathered.
            gathered.meta = dict(gather.result.meta)
            _use_later(gather.result, gathered)
            if place is node:
                for view in reversed(views):
                    gathered = _viewed(graph, gathered, view)
                    _use_later(view, gathered)
    _replace(node, made, own)
    return True


def _stand_before(nodes: tuple[fx.Node | None, ...], last: fx.Node) -> bool:
    """Return whether all nodes stand before another one."""
    missing = {node for node in nodes if node is not None}
    for node in last.graph.nodes:
        if node is last:
            break
        missing.discard(node)
    return not missing


def _is_of_ranks(move: _Move, collective: _Collective) -> bool:
    """Return whether the parts of a move are the ranks' parts of a collective over the first
    dimension: of the result of a gather, or of the input of a scatter."""
    first, last = seen(collective.source), seen(collective.result)
    if first is None or last is None:
        return False
    few, many = sorted((first.shape[0], last.shape[0]))
    moved = move.split_dim if many == last.shape[0] else move.cat_dim
    return moved == 0 and few * move.parts == many


def _use_later(old: fx.Node, new: fx.Node) -> None:
    """Let the uses of a node that stand behind another one take that instead."""
    node = new.next
    while node.op != "root":
        if node in old.users:
            node.replace_input_with(old, new)
        node = node.next


def _fuse_reduction(node: fx.Node, kind: str, target: Any, functional: bool) -> bool:
    """Replace a collective that reduces a product."""
    collective = _collective(node, kind)
    if collective is None:
        return False
    source, views = _through_views(collective.source)
    move = None
    if functional and kind == "reduce_scatter" and not views:
        move = _move(source)
    if move is not None:
        source, views = _through_views(move.source)
    product = _product(source)
    if product is None:
        return False
    if move is not None:
        *joined, split = move.nodes
        used_once = len(split.users) == move.parts and all(len(one.users) == 1 for one in joined)
        if not used_once or not _is_of_ranks(move, collective):
            raise LeftAsItIs("the product's parts are moved in another way than DTensor does")
    if product.bias is not None:
        raise LeftAsItIs("its bias would be added once for each rank")
    _check_operands(product)
    moved = () if move is None else move.nodes
    if any(len(link.users) != 1 for link in (source, *views) if link not in moved):
        raise LeftAsItIs("the product has another use")
    example = seen(collective.source)
    if example is None or example.dim() < 2:
        raise LeftAsItIs("the product has no rows")
    graph = node.graph
    # At the place of the matmul, where its operands have not been written to yet.
    with graph.inserting_before(source):
        x = product.x
        if move is not None:
            tall = seen(move.source)
            short = seen(x)
            assert tall is not None
            assert short is not None
            sizes = [*tall.shape[:-1], short.shape[-1]]
            x = move.of(graph, graph.call_function(_aten.reshape.default, (x, sizes)))
        arguments = (x, product.weight, None, product.depth_first, collective.group)
        made = _viewed(graph, graph.call_function(target, arguments), node)
    _replace(node, made, (*reversed(collective.nodes), *moved, *views, *product.nodes))
    return True


def fuse_matmuls(
    graph: fx.Graph, report: FusionReport | None = None, *, functional: bool = False
) -> int:
    """Replace the patterns of the module in a graph; return how many.

    Args:
        report: Notes them, and the patterns that are left.
        functional: Nothing in the graph writes in place.
    """
    if report is None:
        report = FusionReport()
    before = report.fused.total()
    for node in list(graph.nodes):
        if node.op != "call_function" or node._erased:
            continue
        with report.looking_for("linear(all_gather)", node):
            if _fuse_gather(node, functional):
                report.fused["all_gather_matmul"] += 1
                continue
        for kind, target in _REDUCTIONS.items():
            with report.looking_for(f"{kind}(linear)", node):
                if _fuse_reduction(node, kind, target, functional):
                    report.fused[f"matmul_{kind}"] += 1
                    break
    count = report.fused.total() - before
    if count:
        graph.lint()
    return count
