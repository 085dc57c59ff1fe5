"""A parameter server and its slim form: what holds after every exchange, bit by bit, and how much goes."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partita.errors import RunFailed
from partita.program.pushing import PushPull, Slim
from partita.runtime.relaxed.draw import draw, source
from partita.runtime.relaxed.server import Server
from partita.runtime.relaxed.slim import packed, significance, unpacked

SGD = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
PLAIN = lambda p: torch.optim.SGD(p, lr=0.05)
ADAMW = lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)
SOME = Slim(alpha=0.4, beta=0.2, q=3)


def server(every=1, at="worker", form="server", slim=None):
    plan = PushPull(every, at, form, slim)
    return lambda net, parameters: Server(net, "dp", parameters, {}, plan, 7)


# ---------------------------------------------------------------- everything
@pytest.mark.law
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("form", ["server", "collective"])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_with_the_optimizer_at_the_server_every_worker_has_what_one_device_has(together, form, optimizer, ranks):
    workers = together(server(at="server", form=form), 5, ranks=ranks, optimizer=optimizer)
    alone = together(server(at="server", form="collective"), 0, ranks=ranks)[0].module
    own = optimizer(list(alone.parameters()))
    for step in range(5):
        for p in alone.parameters():
            p.grad = torch.zeros_like(p)
        for rank in range(ranks):
            g = torch.Generator().manual_seed(1000 * step + rank)
            for p in alone.parameters():
                p.grad += torch.randn(p.shape, generator=g, dtype=p.dtype) / ranks
        own.step()
    for worker in workers:
        for p, q in zip(worker.module.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-12)


@pytest.mark.law
def test_at_the_worker_the_model_is_the_mean_of_what_workers_made_of_it(together):
    kept = {}

    def each(worker, step):
        kept.setdefault(step, {})[worker.net.rank] = worker.flat.clone()

    def before(worker):
        return torch.cat([p.detach().reshape(-1) for p in worker.module.parameters()])

    workers = together(server(every=3), 6, optimizer=PLAIN, each=each)
    for step, flats in kept.items():
        equal = all(torch.equal(flats[0], f) for f in flats.values())
        assert equal is (step % 3 == 2)
    start = before(together(server(), 0)[0])
    pushed = torch.zeros_like(start)  # plain SGD: what three steps change is their gradients
    for step in range(3):
        for rank in range(4):
            g = torch.Generator().manual_seed(1000 * step + rank)
            grads = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in workers[0].module.parameters()]
            pushed -= 0.05 * torch.cat([x.reshape(-1) for x in grads])
    assert torch.allclose(kept[2][0], start + pushed / 4, rtol=0, atol=1e-12)


@pytest.mark.law
@pytest.mark.parametrize("every", [1, 3])
def test_at_the_server_batches_of_a_round_count_as_one(together, every):
    workers = together(server(every=every, at="server"), 6, optimizer=PLAIN)
    assert all(torch.equal(w.flat, workers[0].flat) for w in workers)
    start, grads = together(server(), 0)[0].flat, torch.zeros_like(workers[0].flat)
    for step in range(6):
        for rank in range(4):
            g = torch.Generator().manual_seed(1000 * step + rank)
            found = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in workers[0].module.parameters()]
            grads += torch.cat([x.reshape(-1) for x in found]) / 4
    assert torch.allclose(workers[0].flat, start - 0.05 * grads / every, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- slim is the same where everything goes
@pytest.mark.law
@pytest.mark.parametrize("form", ["server", "collective"])
@pytest.mark.parametrize("at", ["worker", "server"])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
@pytest.mark.parametrize("slim", [Slim(1.0, 1.0, 3), Slim(0.3, 0.15, 1), Slim(1.0, 1.0, 2, merge="sum")])
def test_slim_with_everything_is_the_plain_server_bit_by_bit(together, slim, optimizer, at, form):
    plain = together(server(every=2, at=at, form=form), 8, optimizer=optimizer, dtype=torch.float32)
    thin = together(server(every=2, at=at, form=form, slim=slim), 8, optimizer=optimizer, dtype=torch.float32)
    for a, b in zip(plain, thin, strict=True):
        assert torch.equal(a.flat, b.flat)


@pytest.mark.law
@pytest.mark.parametrize("at", ["worker", "server"])
@pytest.mark.parametrize("explorer", ["keys", "seed"])
def test_keys_and_a_seed_explore_the_same(together, explorer, at):
    slim = replace(SOME, explorer=explorer)
    found = together(server(at=at, slim=slim), 7)
    other = together(server(at=at, slim=replace(slim, keys="list")), 7)
    sent = together(server(at=at, slim=replace(SOME, keys="bitmap")), 7)
    for a, b, c in zip(found, other, sent, strict=True):
        assert torch.equal(a.flat, b.flat)
        assert torch.equal(a.flat, c.flat)


# ---------------------------------------------------------------- invariants of slim
@pytest.mark.law
@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("form", ["server", "collective"])
def test_workers_have_the_model_where_they_exchanged_and_all_of_it_after_a_full_round(together, form, merge):
    slim = replace(SOME, merge=merge)
    seen = []

    def each(worker, step):
        (lane,), (channel,) = worker.exchange.lanes, worker.exchange.channels
        model = channel.model()
        everything = step % 3 == 0
        chosen = torch.arange(lane.flat.numel()) if everything else channel.chosen
        seen.append((worker.net.rank, step, torch.equal(lane.flat[chosen], model[chosen])))
        assert len(torch.unique(chosen)) == len(chosen)
        if not everything:
            assert not torch.equal(lane.flat, model)

    together(server(form=form, slim=slim), 7, each=each)
    assert len(seen) == 28
    assert all(equal for *_, equal in seen)


@pytest.mark.law
def test_nothing_pushed_is_lost_or_counted_twice(together):
    """Under "sum": what the servers' model has changed by is the sum of what all workers pushed, over the workers."""
    slim = replace(SOME, merge="sum")
    start, pushed, model = {}, {}, {}

    class Watched(Server):
        def _channel(self, lane, seed):
            channel = super()._channel(lane, seed)
            push, flat = channel.push, lane.flat
            start[self.rank], pushed[self.rank] = flat.clone(), torch.zeros_like(flat)

            def watched(take):
                def taken(where):
                    found = take(where)
                    if where is None:
                        pushed[self.rank] += found
                    else:
                        pushed[self.rank].index_add_(0, where, found)
                    return found

                return push(taken)

            channel.push = watched
            return channel

    def each(worker, step):
        model[step] = worker.exchange.channels[0].model()

    plan = PushPull(1, "worker", "server", slim)
    together(lambda net, parameters: Watched(net, "dp", parameters, {}, plan, 7), 7, each=each)
    total = sum(pushed.values()) / 4
    assert torch.allclose(model[6] - start[0], total, rtol=0, atol=1e-12)


@pytest.mark.law
def test_core_and_explorer_have_their_sizes_and_nothing_in_common(together):
    width = 4 * math.ceil(146 / 4) // 4

    def each(worker, step):
        (channel,) = worker.exchange.channels
        assert channel.core.shape == (4, round(0.2 * width))
        assert channel.rest.shape == (4, width - round(0.2 * width))
        if step % 3:
            keys = channel.chosen.view(4, -1) - torch.arange(4).view(-1, 1) * width
            assert keys.shape[1] == round(0.4 * width)
            for shard in range(4):
                core, explorer = keys[shard].split([channel.size, channel.explored])
                assert not set(core.tolist()) & set(explorer.tolist())
                assert 0 <= int(keys[shard].min()) <= int(keys[shard].max()) < width

    together(server(slim=SOME), 6, each=each)


@pytest.mark.law
def test_the_core_is_what_is_most_significant():
    w, g = torch.tensor([1.0, -4.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, -8.0, 1.0])
    assert significance(w, g, 0.0, 1.0).tolist() == [1, 4, 0, 2]
    assert significance(w, g, "gradient", 1.0).tolist() == [0, 0, 8, 1]
    assert significance(w, g, 0.5, 0.1).tolist() == [1, 4, 40, 7]
    c = (7 / 4) / (9 / 4)
    assert significance(w, g, "auto", 1.0).tolist() == pytest.approx([1, 4, 8 * c, 2 + c])
    assert significance(w, torch.zeros(4), "auto", 1.0).tolist() == [1, 4, 0, 2]


# ---------------------------------------------------------------- bytes
@pytest.mark.law
@pytest.mark.parametrize(("alpha", "beta", "keys"), [(0.3, 0.15, "list"), (0.2, 0.1, "bitmap"), (0.3, 0.15, "auto")])
def test_bytes_are_those_of_the_formulas(together, alpha, beta, keys):
    """Regular: beta n v + (alpha - beta) n (v + key) up, alpha n v down; full: 2 n v and the keys."""
    workers = together(server(slim=Slim(alpha, beta, 20, keys=keys)), 20, sizes=(39, 60), dtype=torch.float32)
    n, v, key = 60 * 40 + 3 * 61 + 1, 4, 4  # one element of padding
    assert workers[0].exchange.lanes[0].flat.numel() == n
    width = n // 4
    core, chosen = 4 * round(beta * width), 4 * round(alpha * width)
    told = 4 * math.ceil(width / 8) if keys in ("bitmap", "auto") else core * key
    full, regular = 2 * n * v + told, core * v + (chosen - core) * (v + key) + chosen * v
    for worker in workers:
        sent = sum(nbytes for _, nbytes, *_ in worker.net.ledger)
        assert sent == full + 19 * regular
    plump = 2 * n * v
    assert (full + 19 * regular) / 20 / plump == pytest.approx({0.3: 0.4085, 0.2: 0.2883}[alpha], rel=0.01)


@pytest.mark.law
def test_a_seed_saves_the_keys(together):
    sent = {}
    for explorer in ("keys", "seed"):
        workers = together(server(slim=replace(SOME, explorer=explorer)), 3)
        sent[explorer] = [sum(n for _, n, *_ in w.net.ledger) for w in workers]
    width = math.ceil(146 / 4)
    keys = 2 * 4 * 4 * (round(0.4 * width) - round(0.2 * width))
    assert [a - b for a, b in zip(sent["keys"], sent["seed"], strict=True)] == [keys] * 4


# ---------------------------------------------------------------- drawing
@pytest.mark.law
def test_every_element_is_explored_as_often_as_any_other():
    """Chi-square at 1e-4; and how many are never seen in q rounds is (1 - share) ** q."""
    among, count, rounds = 400, 70, 600
    seen, blank = torch.zeros(among), torch.zeros(among)
    for number in range(rounds):
        drawn = draw(count, among, source(1, 0, 0, 0, number))
        assert len(torch.unique(drawn)) == count
        seen[drawn] += 1
    expected = rounds * count / among
    variance = rounds * (count / among) * (1 - count / among)
    chi = float(((seen - expected) ** 2 / variance).sum()) * (among - 1) / among
    assert chi < among - 1 + 3.9 * math.sqrt(2 * (among - 1))
    for block in range(rounds // 20):
        hit = torch.zeros(among, dtype=torch.bool)
        for number in range(20 * block, 20 * block + 20):
            hit[draw(count, among, source(1, 0, 0, 0, number))] = True
        blank += ~hit
    left, share = float(blank.mean()) / (rounds // 20), (1 - count / among) ** 20
    assert left == pytest.approx(share, abs=4 * math.sqrt(share / (among * rounds / 20)))


@pytest.mark.law
@pytest.mark.parametrize(("count", "among"), [(0, 0), (0, 5), (1, 1), (1, 2), (5, 5), (4, 5), (3, 5), (999, 1000), (500, 1000)])
def test_any_number_can_be_drawn(count, among):
    for number in range(20):
        drawn = draw(count, among, source(number)).tolist()
        assert len(set(drawn)) == len(drawn) == count
        assert drawn == sorted(drawn)
        assert all(0 <= k < among for k in drawn)


@pytest.mark.law
def test_drawing_costs_what_is_drawn_and_not_what_there_is():
    class Counted(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            some = out if isinstance(out, tuple | list) else [out]
            Counted.elements += sum(t.numel() for t in some if isinstance(t, torch.Tensor))
            return out

    cost = {}
    for among in (10**5, 10**9):
        Counted.elements = 0
        with Counted():
            draw(1000, among, source(3))
        cost[among] = Counted.elements
    assert cost[10**9] < 20 * 1000
    assert cost[10**9] <= 1.1 * cost[10**5]


@pytest.mark.law
@pytest.mark.parametrize("width", [1, 8, 13, 64])
def test_a_bitmap_says_what_a_list_says(width):
    for count in range(width + 1):
        keys = draw(count, width, source(width, count))
        assert packed(keys, width).numel() == math.ceil(width / 8)
        assert torch.equal(unpacked(packed(keys, width), width), keys)


# ---------------------------------------------------------------- a peer that misbehaves
@pytest.mark.law
@pytest.mark.parametrize("key", [-1, 10**6])
def test_a_key_out_of_range_is_refused_with_its_rank(together, key):
    class Wrong(Server):
        def _channel(self, lane, seed):
            channel = super()._channel(lane, seed)
            if self.rank == 2:
                keys = channel._keys

                def wrong(mine):
                    return keys(torch.full_like(mine, key))

                channel._keys = wrong
            return channel

    plan = PushPull(1, "worker", "server", SOME)
    with pytest.raises(RunFailed, match=f"rank 2 of axis 'dp' pushed key {key}"):
        together(lambda net, parameters: Wrong(net, "dp", parameters, {}, plan, 7), 3)
