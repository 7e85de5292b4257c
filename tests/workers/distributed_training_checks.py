# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients in training, with DDP on backend "tdcoll" and with the hook, on every rank of a
job."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from backend_job import handled, same
from harness import check, device, everyone, expect, expect_raises, rank, shared, world
from torch import nn
from torch._dynamo import convert_frame
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tdcoll
from tdcoll import runtime
from tdcoll.distributed import ddp as hooks
from tdcoll.distributed import explain, sparse_hook, sparse_pass
from tdcoll.distributed.sparse import SparseAllReduce

DDP = nn.parallel.DistributedDataParallel


class Model(nn.Module):
    """Tables and a dense layer, of small integers: sums are exact in any order."""

    def __init__(self, sparse_tables: bool, tables: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tables = nn.ModuleList(
            nn.Embedding(16, 4, sparse=sparse_tables) for _ in range(tables)
        )
        self.dense = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape))
        self.to(device())

    def forward(self, lookups: dict[int, torch.Tensor]) -> torch.Tensor:
        rows = [self.tables[table](ids).sum(0) for table, ids in lookups.items()]
        return self.dense(sum(rows, torch.zeros(4, device=device())))


def lookups(step: int, tables: int = 1) -> dict[int, torch.Tensor]:
    ids = (torch.arange(5, device=device()) * (rank() + 1) + step) % 16
    return {table: (ids + table) % 16 for table in range(tables)}


def train(
    model: nn.Module, batches: list[dict[int, torch.Tensor]], finish=lambda: None
) -> list[torch.Tensor]:
    """The weights afterwards; exact in fp32 for a few steps, since world and learning rate are
    such."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches:
        optimizer.zero_grad()
        (model(batch).sum() * world()).backward()
        finish()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def dense_run(batches: list[dict[int, torch.Tensor]], tables: int = 1) -> list[torch.Tensor]:
    return train(DDP(Model(False, tables), find_unused_parameters=True), batches)


def equal(got: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    for one, other in zip(got, wanted, strict=True):
        same(one, other, what)


@check
def ddp_with_the_backend() -> None:
    batches = [lookups(step, 2) for step in range(3)]
    before = handled("sparse_all_reduce")
    equal(train(DDP(Model(True, 2)), batches), dense_run(batches, 2), "DDP")
    expect(handled("sparse_all_reduce") - before == 6, explain())

    accumulated = []
    for sparse_tables in (True, False):
        model = DDP(Model(sparse_tables))
        with model.no_sync():
            model(lookups(0)).sum().backward()
        model(lookups(1)).sum().backward()
        accumulated.append([parameter.grad.to_dense() for parameter in model.parameters()])
    equal(*accumulated, "no_sync")


@check
def compiled_models() -> None:
    """DDP broadcasts the buffer within the compiled call, and sums gradients of both kinds outside
    of it."""

    class Shifted(Model):
        def __init__(self, sparse_tables: bool) -> None:
            super().__init__(sparse_tables)
            self.register_buffer("shift", torch.full((2,), 2.0 + rank(), device=device()))

        def forward(self, lookups: dict[int, torch.Tensor]) -> torch.Tensor:
            return (super().forward(lookups) + self.shift).relu()

    batches = [lookups(step) for step in range(3)]
    for sparse_tables in (True, False):
        compiled = torch.compile(DDP(Shifted(sparse_tables)), backend="aot_eager")
        equal(
            train(compiled, batches),
            train(DDP(Shifted(sparse_tables)), batches),
            f"sparse tables: {sparse_tables}",
        )

    @torch.compile(backend="eager")
    def makes_a_group(tensor: torch.Tensor) -> torch.Tensor:
        group = dist.new_group(everyone())
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
        return tensor

    same(
        makes_a_group(torch.ones(4, device=device())),
        torch.full((4,), float(world())),
        "a group of its own",
    )
    tried = [code().co_filename for code in convert_frame.input_codes.seen if code() is not None]
    expect(__file__ in tried, "the model has not been compiled")
    of_tdcoll = [name for name in tried if name.startswith(os.path.dirname(tdcoll.__file__))]
    expect(not of_tdcoll, f"Dynamo has tried to compile functions in {of_tdcoll}")
    torch._dynamo.reset()


@check
def clipping_of_sharded_beside_sparse_and_other_gradients() -> None:
    mesh = init_device_mesh(device().type, (world(),))
    for order in (0.0, 1.0, 2.0, float("inf")):
        for sparse in (True, False):
            model, dense = Model(sparse), Model(False)
            for one in (model, dense):
                one({0: torch.arange(5, device=device())}).square().sum().backward()
            whole = torch.zeros(2 * world(), 4, device=device())
            whole[:: world()] = model.dense.weight.grad
            model.dense.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
            model.dense.weight.grad = distribute_tensor(whole, mesh, [Shard(0)])
            got = [tdcoll.distributed.clip_grad_norm_(model.parameters(), 2.0, order)]
            got += [model.dense.weight.grad.full_tensor()[:: world()], model.dense.bias.grad]
            got += [parameter.grad.to_dense() for parameter in model.tables.parameters()]
            wanted = [
                nn.utils.clip_grad_norm_(dense.parameters(), 2.0, order),
                dense.dense.weight.grad,
            ]
            wanted += [
                dense.dense.bias.grad,
                *(parameter.grad for parameter in dense.tables.parameters()),
            ]
            torch.testing.assert_close(got, wanted)


@check
def clipping_of_gradients_of_several_meshes() -> None:
    """DTensors of two meshes, which torch's function doesn't take together, with and without other
    gradients."""
    meshes = (
        init_device_mesh(device().type, (world(),)),
        init_device_mesh(device().type, (1, world())),
    )
    shards = [Shard(0)], [Replicate(), Shard(0)]
    for order, beside in (
        (1.0, False),
        (2.0, True),
        (0.0, True),
        (float("inf"), False),
        (float("-inf"), True),
    ):
        sharded, dense = [], []
        for place, (mesh, placements) in enumerate(zip(meshes, shards, strict=True)):
            whole = torch.arange(1.0, 1 + 4 * world(), device=device()).view(2 * world(), 2) * (
                place + 1
            )
            for list_, grad in (
                (sharded, distribute_tensor(whole, mesh, placements)),
                (dense, whole.clone()),
            ):
                list_.append(nn.Parameter(torch.zeros_like(grad)))
                list_[-1].grad = grad
        if beside:
            for list_ in (sharded, dense):
                list_.append(nn.Parameter(torch.zeros(3, device=device())))
                list_[-1].grad = torch.full((3,), 5.0, device=device())
        expect_raises(RuntimeError, lambda s=sharded, o=order: nn.utils.clip_grad_norm_(s, 2.0, o))
        got = [tdcoll.distributed.clip_grad_norm_(sharded, 2.0, order)]
        got += [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in sharded]
        wanted = [
            nn.utils.clip_grad_norm_(dense, 2.0, order),
            *(parameter.grad for parameter in dense),
        ]
        torch.testing.assert_close(got, wanted)


def other_group() -> dist.ProcessGroup:
    return dist.new_group(
        backend="gloo" if device().type == "cpu" or shared() else "cpu:gloo,cuda:nccl"
    )


def exchanges() -> int:
    """How many calls the hook and the reducers have made by tdcoll."""
    sums = runtime.current().contexts.get(("tdcoll.distributed", tuple(everyone())))
    return 0 if sums is None or sums.context is None else int(sums.context.lists_made)


@check
def ddp_hook_with_another_backend() -> None:
    """One call for the tables of a step, the first too, after which DDP makes other buckets. DDP
    copies no result."""
    group = other_group()
    batches = [lookups(step, 3) for step in range(3)]
    model, before = DDP(Model(True, 3), process_group=group), exchanges()
    model.register_comm_hook(group, sparse_hook)
    with torch.profiler.profile() as profile:
        got = train(model, batches)
    parents = {event.cpu_parent.name for event in profile.events() if event.cpu_parent is not None}
    expect("aten::copy_sparse_to_sparse_" not in parents, "DDP copies means into the gradients")
    expect(
        exchanges() - before <= 2 * len(batches),
        "a call that grows the context exchanges lists twice",
    )
    equal(got, dense_run(batches, 3), "sparse_hook")
    before = exchanges()
    train(model, batches)
    expect(
        exchanges() - before == len(batches),
        f"{exchanges() - before} calls in {len(batches)} steps",
    )


@check
def ddp_hook_of_two_models_in_one_pass() -> None:
    """Their buckets alternate. If the hook doesn't know whose each is, as of wrappers older than
    the job, each gradient has a call of its own."""
    group, batch, living = other_group(), lookups(1, 3), hooks.living_ddp
    modules, gradients, inner = [Model(True, 3) for _ in range(2)], [], []
    modules[0].dense.register_forward_pre_hook(lambda *_: inner.append(models[1](batch)))
    for case in ("known", "older", "without the hook"):
        hooks.living_ddp = (lambda _: []) if case == "older" else living
        hooks._scan()
        of, how = (None, None) if case == "without the hook" else (group, sparse_hook)
        models = [DDP(module, process_group=of) for module in modules]
        for model in models if how else ():
            model.register_comm_hook(of, how)
        before = exchanges()
        ((models[0](batch).square().sum() + inner.pop().square().sum()) * world()).backward()
        calls = {"known": 2, "older": 6, "without the hook": 0}[case]
        expect(exchanges() - before == calls, f"{case}: {exchanges() - before} calls")
        gradients.append(
            [parameter.grad.to_dense() for module in modules for parameter in module.parameters()]
        )
        for module in modules:
            module.zero_grad()
    hooks.living_ddp = living
    for got in gradients[:-1]:
        equal(got, gradients[-1], "two models")


@check
def ddp_hook_with_a_static_graph() -> None:
    """DDP does not tell which bucket of the first pass is the last."""
    group, batches = other_group(), [lookups(step, 2) for step in range(2)]
    model = DDP(Model(True, 2), process_group=group, static_graph=True)
    model.register_comm_hook(group, sparse_hook)
    equal(train(model, batches), dense_run(batches, 2), "static graph")


@check
def ddp_hook_with_a_gradient_that_is_refused() -> None:
    """It goes through the process group, and the others by one call."""
    gathered = sparse_pass.Pass(other_group())
    one = torch.sparse_coo_tensor([[0]], [[1.0]], (2, 1), device=device(), check_invariants=False)
    refused = torch.sparse_coo_tensor(
        [[0], [rank()]], [1.0], (1, world()), device=device(), check_invariants=False
    )
    for gradient in (one, refused, one.clone()):
        gathered.add(gradient, sparse_pass.stream_of(gradient))
    share = torch.full((), 1 / world()).item()
    for growing in (True, False):
        before = exchanges()
        means = [mean.to_dense().flatten().tolist() for mean in gathered.reduce()]
        expect(means == [[1.0, 0.0], [share] * world(), [1.0, 0.0]], f"means {means}")
        expect(growing or exchanges() - before == 1, f"{exchanges() - before} calls")


@check
def ddp_hook_after_an_aborted_pass() -> None:
    """A pass that ends with an exception, between the buckets of its tables, leaves nothing to the
    next one's call."""
    group, module, broken = other_group(), Model(True, 3), False
    reduce, together = SparseAllReduce.reduce, []

    def fail(gradient: torch.Tensor) -> None:
        if broken:
            raise ValueError("on purpose")

    def counted(self: SparseAllReduce, tensors: list[torch.Tensor], op: str) -> list[torch.Tensor]:
        together.append(len(tensors))
        return reduce(self, tensors, op)

    module.tables[0].weight.register_hook(fail)
    SparseAllReduce.reduce = counted
    for broken in (False, True, False):
        # which a pass that did not finish leaves of no use
        model = DDP(module, process_group=group)
        model.register_comm_hook(group, sparse_hook)
        if broken:
            expect_raises(
                ValueError, lambda m=model: m(lookups(1, 3)).sum().backward(), "on purpose"
            )
        else:
            other = Model(False, 3)
            other.load_state_dict(module.state_dict())
            wanted = train(DDP(other, find_unused_parameters=True), [lookups(2, 3)])
            equal(train(model, [lookups(2, 3)]), wanted, "beside an aborted pass")
    SparseAllReduce.reduce = reduce
    expect(together == [3, 3], f"calls of {together} gradients")
