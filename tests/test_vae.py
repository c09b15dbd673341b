"""Subgoals and action models: labels, what the history may contain, losses, ceilings and figures."""

import math
from pathlib import Path

import pretrain_vae as vae
import stag_hunt_env as game
from stag_hunt_env import STAY, StagHuntEnv, planes
from stag_hunt_env import StagHuntConfig as Config

import numpy as np
import pytest
import reference_game as reference
import torch
from helpers import PRETRAINING_CASES, lines_of, record_games, replay, seeded
from torch import distributions
from torch.nn import functional as F

PLAYERS = "nearest_hare,random,nearest_stag"  # not in the order of PLAYER_PROBS
every_case = pytest.mark.parametrize("config", PRETRAINING_CASES.values(), ids=PRETRAINING_CASES)
both_kinds = pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])


def played(config, num_games, seed=1, population=PLAYERS):
    """[1, R, T, ...]"""
    torch.manual_seed(seed)
    env = StagHuntEnv(config, num_games, "cpu", seed)
    return vae.Trajectories(*(x[None] for x in vae.play_trajectories(env, population)))


def small_args(**changes):
    return vae.make_args(**{"subgoal_hidden": 16, "goal_dim": 4, "device": "cpu", "population": PLAYERS, **changes})


def random_models(args, config, seeds=(1,), scale=3.0):
    models = vae.make_models(args, config, list(seeds), torch.device("cpu"))
    for p in all_parameters(models):
        p.data.mul_(scale)
    return models


def all_parameters(models):
    return [p for stacked in models.values() for p in stacked.parameters()]


def whole_batch(config, data, extra=0):
    """All trajectories; `extra` samples beyond those that count"""
    index = torch.arange(data.acted.shape[1]).expand(len(data.acted), -1)
    return vae.make_batch(config, data, index, int(data.acted.sum((1, 2)).max()) + extra)


def make_noise(args, batch, seed=3):
    torch.manual_seed(seed)
    return vae.goal_noise(args, 2, *batch.clock.shape, device="cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Labels


def plain_trajectories(config, games, population):
    """The same from plain loops over the plain-Python game, with Bayes' rule over the population"""
    n, nowhere, num_games = config.num_players, config.num_cells, len(games.actions)
    names = ("board", "walls", "joint", "legal", "acted", "likely")
    rows = [{name: [] for name in names} | {"prey": 0} for _ in range(num_games * n)]
    weights = [[1.0] * len(population) for _ in rows]
    for g, _, before, actions, _, acted, _, after in replay(config, games):
        for j in range(n):
            row, belief, ego = rows[g * n + j], weights[g * n + j], [(j + k) % n for k in range(n)]
            cells = [before.position[s] if before.present[s] else nowhere for s in ego]
            prey = [c if alive else nowhere for c, alive in zip(before.prey, before.alive, strict=True)]
            row["board"].append(cells + prey)
            row["walls"].append([c in before.walls for c in range(config.num_cells if config.max_wall_pieces else 1)])
            row["joint"].append([actions[s] for s in ego])
            row["legal"].append([a in reference.legal_actions(config, before, j) for a in range(7)])
            row["acted"].append(acted[j])
            probs = [reference.player_probs(config, before, j, name) for name in population]
            row["likely"].append((probs, [w / sum(belief) for w in belief]))
            if before.present[j] and not after.present[j]:
                row["prey"] = actions[j] - STAY
            if acted[j]:
                weights[g * n + j] = [w * p[actions[j]] for w, p in zip(belief, probs, strict=True)]
    return rows


@every_case
def test_trajectories_are_those_of_the_plain_game(config):
    env, population = StagHuntEnv(config, 12, "cpu", 1), PLAYERS.split(",")
    torch.manual_seed(1)
    ours, games = record_games(env, vae.play_trajectories, PLAYERS)
    rows = plain_trajectories(config, games, population)
    for name in ("board", "walls", "joint", "legal", "acted", "prey"):
        assert torch.equal(getattr(ours, name).long(), torch.tensor([row[name] for row in rows]).long()), name
    kinds = set()
    for r, t in ours.acted.nonzero().tolist():
        probs, belief = rows[r]["likely"][t]
        bayes = [sum(w * p[a] for w, p in zip(belief, probs, strict=True)) for a in range(7)]
        assert torch.allclose(ours.bayes[r, t], torch.tensor(bayes), atol=1e-5)
        same = [k for k, p in enumerate(probs) if np.allclose(p, ours.known[r, t], atol=1e-6)]
        assert same, "somebody of the population"
        kinds |= set(same) if len(same) == 1 else set()
    assert kinds == {0, 1, 2} and set(ours.prey.tolist()) == {0, 1, 2}, "every kind and every ending should occur"
    assert int(ours.acted.sum()) < ours.acted.numel()


def test_training_and_held_out_games_differ():
    args = small_args(num_samples=500, held_out_games=40, population="nearest_hare")
    train, held_out = vae.collect_trajectories(args, args.config, 1, "cpu")
    other = vae.collect_trajectories(args, args.config, 2, "cpu")[0]
    assert 500 <= int(train.acted.sum()) < 500 + args.config.final_time and len(held_out.acted) == 40 * 4
    starts = [{tuple(row) for row in part.board[:, 0].tolist()} for part in (train, held_out, other)]
    assert not starts[0] & starts[1] and not starts[0] & starts[2]
    for part in (train, held_out):
        assert not (part.joint[..., 0][part.acted] == STAY).any(), "there is a hare for everybody, and all go for it"


def test_env_steps_are_counted_once_for_all_players_of_a_game():
    """Two seeds of a game of two players: rows 0 and 1 are one game, the last row is half of another"""
    config = PRETRAINING_CASES["two players"]
    acted = torch.zeros(2, 3, 4, dtype=torch.bool)
    acted[0, 0, :2] = True
    acted[0, 1, :3] = True
    acted[0, 2, :1] = True
    acted[1, 1, :2] = True  # and nothing in its second game
    assert vae.watched_steps(config, acted) == ((3 + 1) + (2 + 0)) / 2


def test_batches_hold_each_sample_once_and_what_belongs_to_it():
    config = PRETRAINING_CASES["walls"]
    data = played(config, 6)
    index = torch.tensor([[5, 0, 11, 3, 17, 8, 2, 14]])
    count = int(data.acted[0, index[0]].sum())
    batch = vae.make_batch(config, data, index, count + 7)
    assert batch.weight.sum() == count and batch.weight.shape == (1, count + 7)
    seen = set()
    for k in range(count):
        trajectory, t = divmod(int(batch.place[0, k]), config.final_time)
        r = int(index[0, trajectory])
        seen.add((r, t))
        assert data.acted[0, r, t] and float(batch.clock[0, k]) == pytest.approx(t / config.final_time)
        for name in ("board", "walls", "joint", "legal"):
            assert torch.equal(getattr(batch, name)[0, k].long(), getattr(data, name)[0, r, t].long())
        last = max(u for u in range(config.final_time) if data.acted[0, r, u])
        assert int(batch.place[0, batch.last[0, k]]) == trajectory * config.final_time + last
    assert len(seen) == count


@every_case
def test_targets_are_what_the_observer_sees(config):
    env = StagHuntEnv(config, 5, "cpu", 1)
    ours, games = record_games(env, vae.play_trajectories, PLAYERS)
    batch = whole_batch(config, vae.Trajectories(*(x[None] for x in ours)))
    boards = env.observe(type(games.states)(*(x[:, :-1].flatten(0, 1) for x in games.states))).flatten(2)
    row, t = batch.place[0] // config.final_time, batch.place[0] % config.final_time
    seen = boards.unflatten(0, games.actions.shape[:2])[row // config.num_players, t, row % config.num_players]
    assert torch.equal(planes(config, batch.board, batch.walls)[0].flatten(1), seen)


SQUARE_WITH_WALLS = Config(height=4, width=4, num_players=2, num_hares=2, max_wall_pieces=2, final_time=8)


@pytest.mark.parametrize("config", [*PRETRAINING_CASES.values(), SQUARE_WITH_WALLS], ids=[*PRETRAINING_CASES, "square"])
def test_symmetries_commute_with_the_game(config):
    env = StagHuntEnv(config, 20, "cpu", 1)
    _, games = record_games(env, vae.play_trajectories, PLAYERS)
    cells, actions = vae.symmetries(config, "cpu")
    assert len({tuple(c) for c in cells.tolist()}) == len(actions) == (8 if config.height == config.width else 4)
    before = type(games.states)(*(x[:, :-1].flatten(0, 1) for x in games.states))
    joint = torch.randint(7, before.position.shape, generator=seeded(1))
    after, reward, acted, done = env.transition(before, joint)

    def moved(state, to):
        position, prey = (to[x.long()].to(x.dtype) for x in (state.position, state.prey_position))
        walls = torch.zeros_like(state.walls)
        walls[..., to[:-1]] = state.walls
        return state._replace(position=position, prey_position=prey, walls=walls)

    for to, act in zip(cells, actions, strict=True):
        new_after, *new = env.transition(moved(before, to), act[joint])
        assert all(torch.equal(x, y) for x, y in zip(new_after, moved(after, to), strict=True))
        assert all(torch.equal(x, y) for x, y in zip(new, (reward, acted, done), strict=True))
        assert torch.equal(env.legal_actions(moved(before, to))[..., act], env.legal_actions(before))
    data = played(config, 6)
    plain = whole_batch(config, data)
    for s, (to, act) in enumerate(zip(cells, actions, strict=True)):
        which = torch.full((1, data.acted.shape[1]), s)
        turned = vae.turn_batch(config, plain, vae.Symmetries(cells, actions), which)
        assert torch.equal(turned.board, to[plain.board]) and torch.equal(turned.joint, act[plain.joint])
        assert torch.equal(turned.legal[..., act], plain.legal) and torch.equal(turned.weight, plain.weight)
        if config.max_wall_pieces:
            assert torch.equal(turned.walls[..., to[:-1]], plain.walls)


# ---------------------------------------------------------------------------------------------------------------------
# Only steps at which j was there, only what came before


def after_leaving_changed(data, config):
    """The same trajectories with nonsense wherever j had left"""
    generator, left = seeded(9), ~data.acted[..., None]
    anything = torch.randint(config.num_cells, data.board.shape, generator=generator).to(torch.uint8)
    actions = torch.randint(7, data.joint.shape, generator=generator).to(torch.uint8)
    nonsense = {"board": torch.where(left, anything, data.board), "joint": torch.where(left, actions, data.joint)}
    probs = {name: torch.where(left, 1 / 7, getattr(data, name)) for name in ("bayes", "known")}
    return data._replace(**nonsense, **probs, legal=data.legal | left)


@both_kinds
def test_steps_after_leaving_do_not_count(goal_kind):
    config, args = PRETRAINING_CASES["walls"], small_args(goal_kind=goal_kind)
    data = played(config, 8)
    models, found = random_models(args, config), []
    for d in (data, after_leaving_changed(data, config)):
        batch = whole_batch(config, d, extra=60)
        losses = vae.vae_losses(args, config, models, batch, make_noise(args, batch))
        gradient = torch.autograd.grad(losses["losses/total"].sum(), all_parameters(models))
        found.append((losses, torch.cat([g.flatten() for g in gradient]), vae.measure(args, config, models, d)[0]))
    (losses, gradient, tables), (other_losses, other_gradient, other_tables) = found
    for name, value in losses.items():
        assert torch.isfinite(value).all() and torch.allclose(value, other_losses[name], rtol=1e-5), name
    assert torch.allclose(gradient, other_gradient, atol=1e-5)
    for name in vae.PREDICTORS:
        assert tables[0][name] == pytest.approx(other_tables[0][name], abs=1e-5, nan_ok=True)
        assert tables[0][name]["count/4"] < int((data.joint[..., 0] == STAY).sum()), "the stays of those who left"


def test_losses_are_means_over_the_samples_that_count():
    config, args = PRETRAINING_CASES["two players"], small_args(kl_coef=0.25)
    data, models = played(config, 6), random_models(args, config)
    batch = whole_batch(config, data, extra=9)
    noise = make_noise(args, batch)
    with torch.no_grad():
        losses = {name: float(x) for name, x in vae.vae_losses(args, config, models, batch, noise).items()}
        prior = models["prior"](batch.board, batch.walls)
        posterior, _ = vae.infer_trajectories(models["inference"], batch)
        inputs = batch.board, batch.walls, batch.clock
        goals = [vae.sample_goal("continuous", p, e) for p, e in zip((prior, posterior), noise, strict=True)]
        log_probs = [models[m](*inputs, g, batch.legal) for m, g in zip(("moa_prior", "moa"), goals, strict=True)]
    samples = [k for k in range(batch.place.shape[1]) if batch.weight[0, k]]
    slot = {int(batch.place[0, k]): k for k in samples}
    plain = {"moa_vae": 0.0, "moa_cvae": 0.0, "kl_cvae": 0.0, "kl_vae": 0.0}
    for k in samples:
        r, t = divmod(int(batch.place[0, k]), config.final_time)
        last = slot[r * config.final_time + max(u for u in range(config.final_time) if data.acted[0, r, u])]
        for name, log_prob in zip(("moa_vae", "moa_cvae"), log_probs, strict=True):
            plain[name] -= float(log_prob[0, k, int(data.joint[0, r, t, 0])]) / len(samples)
        plain["kl_cvae"] += float(vae.goal_kl("continuous", posterior[0, k], prior[0, last])) / len(samples)
        plain["kl_vae"] += float(vae.goal_kl("continuous", prior[0, k], torch.zeros(8))) / len(samples)
    assert {name: losses[f"losses/{name}"] for name in plain} == pytest.approx(plain, rel=1e-4)
    terms = sum(
        losses[f"losses/{a}_{b}"] * (0.25 if a == "kl" else 1) for a in ("recon", "kl", "moa") for b in ("vae", "cvae")
    )
    assert losses["losses/total"] == pytest.approx(terms, rel=1e-5)


def test_history_ends_before_the_step():
    config, args = Config(final_time=12), small_args()
    data, models = played(config, 6, population="random"), random_models(args, config)

    def infer(d):  # [2, R, T, _]: histories and distributions, 0 where j had left
        batch = whole_batch(config, d)
        posterior, history = vae.infer_trajectories(models["inference"], batch)
        grid = torch.zeros(2, data.acted.shape[1] * 12, history.shape[2])
        grid[0, batch.place[0]] = history[0].detach()
        grid[1, batch.place[0], : posterior.shape[2]] = posterior[0].detach()
        return grid.unflatten(1, (-1, 12))

    before = infer(data)
    assert (before[0, :, 0] == 0).all(), "every trajectory starts from nothing"
    r = int(data.acted[0].sum(1).argmax())
    others = torch.arange(before.shape[1]) != r
    for t in (0, 3, 6):
        joint, board = data.joint.clone(), data.board.clone()
        joint[0, r, t] = (joint[0, r, t] + 1) % 7
        same = torch.isclose(infer(data._replace(joint=joint)), before, atol=1e-5).all(3)
        assert same[:, others].all() and same[:, r, : t + 1].all(), "an action is not known when it is predicted"
        assert not same[0, r, t + 1] and not same[1, r, t + 1], "but at the next step"
        board[0, r, t, 0] = (board[0, r, t, 0] + 1) % 16
        same = torch.isclose(infer(data._replace(board=board)), before, atol=1e-5).all(3)
        assert same[:, others].all() and same[:, r, :t].all()
        assert same[0, r, t] and not same[1, r, t] and not same[0, r, t + 1]


def test_history_adds_up_the_events_so_far():
    config, args = PRETRAINING_CASES["walls"], small_args()
    models = random_models(args, config, scale=1.5)
    batch, inference = whole_batch(config, played(config, 5)), models["inference"]
    with torch.no_grad():
        _, history = vae.infer_trajectories(inference, batch)
        event = inference(inference(batch.board, batch.walls, method="encoder"), batch.joint, method="event")[0]
    slot = {int(place): k for k, place in enumerate(batch.place[0])}
    for place, k in slot.items():
        start = place - place % config.final_time
        plain = sum((event[slot[p]] for p in range(start, place)), torch.zeros_like(event[0]))
        now, before = history[0, k].chunk(2)
        assert torch.allclose(now, plain, atol=1e-4, rtol=1e-4) and now[0] == place - start, "the first entry counts"
        assert not before.any(), "of earlier games nothing is known"


class Recorded:
    """A network that keeps the boards that it was asked about"""

    def __init__(self, network):
        self.network, self.seen = network, []

    def __call__(self, *inputs, method="forward"):
        if method == "forward":
            self.seen.append(inputs[0])
        return self.network(*inputs, method=method)


def untrained_epoch(args, config, data, epoch):
    """An epoch with steps too small to matter -> losses, boards seen [n, N + P]"""
    models = random_models(args, config)
    optimizer = torch.optim.Adam(all_parameters(models), fused=True)
    models["prior"] = Recorded(models["prior"])
    losses = vae.train_epoch(args, config, models, optimizer, data, epoch)
    return losses, torch.cat(models["prior"].seen, 1)[0]


def in_order(boards):
    return sorted(map(tuple, boards.tolist()))


def test_every_epoch_shows_all_samples_once_in_an_order_of_its_own():
    config, tiny = PRETRAINING_CASES["two players"], {"learning_rate": 1e-30, "batch_size": 32}
    data = played(config, 40)
    all_boards = in_order(data.board[data.acted])
    args = small_args(**tiny, augment=False)
    (_, first), (_, second), (_, again) = (untrained_epoch(args, config, data, epoch) for epoch in (0, 1, 0))
    assert in_order(first) == in_order(second) == all_boards
    assert (first != second).any(1).float().mean() > 0.8 and torch.equal(first, again)
    cells, _ = vae.symmetries(config, "cpu")

    def turned_alike(boards):  # each in the one of its symmetries that comes first
        return sorted(min(tuple(to[board].tolist()) for to in cells) for board in boards.long())

    _, turned = untrained_epoch(small_args(**tiny, augment=True), config, data, 0)
    _, otherwise = untrained_epoch(small_args(**tiny, augment=True), config, data, 1)
    assert turned_alike(turned) == turned_alike(data.board[data.acted])
    unchanged = set(all_boards)
    assert 0.1 < np.mean([tuple(board) in unchanged for board in turned.tolist()]) < 0.5, "one symmetry in four"
    assert in_order(turned) != in_order(otherwise)


def test_the_losses_of_an_epoch_are_means_over_all_its_samples():
    config = PRETRAINING_CASES["two players"]
    data = played(config, 40)
    args = small_args(learning_rate=1e-30, batch_size=72, augment=False)  # 80 trajectories: the last batch is small
    losses, _ = untrained_epoch(args, config, data, 0)
    batch = whole_batch(config, data)
    with torch.no_grad():
        expected = vae.vae_losses(args, config, random_models(args, config), batch, make_noise(args, batch))
    without_noise = ("losses/kl_vae", "losses/kl_cvae")
    for name in without_noise:
        assert losses[name] == pytest.approx(expected[name].tolist(), rel=1e-4)
    args = small_args(learning_rate=1e-30, batch_size=80, augment=False)  # one batch: the order plays no part
    first, second = (untrained_epoch(args, config, data, epoch)[0] for epoch in (0, 1))
    for name in first.keys() - {"losses/total"}:
        same = first[name] == pytest.approx(second[name], rel=1e-5)
        assert same == (name in without_noise), "each epoch draws its own subgoals"


def test_right_labels_come_near_the_ceiling():
    """On a board of one row what a hunter does is certain, given its kind: the kind shows at its first step."""
    config = Config(height=1, width=7, num_players=2, num_hares=1, final_time=6)
    args = small_args(epochs=6, subgoal_hidden=24, batch_size=64, learning_rate=2e-2)
    data, held_out = (played(config, *size, population="nearest_stag,nearest_hare") for size in ((150, 1), (100, 2)))
    models = vae.make_models(args, config, [1], torch.device("cpu"))
    optimizer = torch.optim.Adam(all_parameters(models), fused=True)
    for epoch in range(args.epochs):
        vae.train_epoch(args, config, models, optimizer, data, epoch)
    (table,), _ = vae.measure(args, config, models, held_out)
    ceiling = table["ceiling: Bayes from history"]["nll"]
    # With labels shifted by one step it is 1.6, with the state alone 0.17 above the ceiling.
    assert ceiling < table["with history"]["nll"] < ceiling + 0.2
    assert table["with history"]["nll"] < table["state only"]["nll"]


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def test_predictions_are_distributions_over_legal_actions():
    config, args = PRETRAINING_CASES["walls"], small_args()
    data, models = played(config, 15), random_models(small_args(), PRETRAINING_CASES["walls"])
    probs, goals = vae.predict_probs(args, config, models, data, size=7)
    acted = data.acted[0]
    assert torch.allclose(probs[:, 0][:, acted].sum(2), torch.ones(()), atol=1e-4)
    assert (probs[:, 0][:, acted][:, ~data.legal[0][acted]] < 1e-6).all()
    assert torch.equal(probs[2], data.bayes) and torch.equal(probs[3], data.known)
    assert goals.shape == (2, *data.acted.shape, 4) and goals[:, 0][:, acted].abs().sum() > 0
    (table,), (drawn,) = vae.measure(args, config, models, data)
    for t in range(config.final_time):
        rows = acted[:, t].nonzero()[:, 0].tolist()
        right = [bool(data.known[0, r, t].argmax() == data.joint[0, r, t, 0]) for r in rows]
        assert not rows or drawn["ceiling: kind known"]["by_step"][t] == pytest.approx(np.mean(right))
    own = data.known[0][acted].gather(1, data.joint[0, ..., :1][acted].long())
    assert table["ceiling: kind known"]["nll"] == pytest.approx(-float(own.log().mean()), abs=1e-4)
    assert (
        table["ceiling: kind known"]["nll"] < table["ceiling: Bayes from history"]["nll"] < table["with history"]["nll"]
    )


def test_figures_are_those_of_held_out_games(tmp_path, monkeypatch):
    monkeypatch.setattr(vae, "draw_pictures", lambda *_: None)
    config = PRETRAINING_CASES["two players"]
    args = small_args(num_samples=300, held_out_games=30, epochs=2, config=config, run_dir=str(tmp_path))
    figures = vae.main(args)
    models = vae.make_models(args, config, [args.seed], torch.device("cpu"))
    checkpoint = game.load_checkpoint(figures["checkpoint"], vae.FORMAT)
    assert checkpoint["networks"].keys() == {"prior", "inference", "moa"}, "what a learner starts from"
    for name, saved in (checkpoint["networks"] | {"moa_prior": checkpoint["moa_prior"]}).items():
        models[name].load_state_dict(saved)
    held_out = vae.collect_trajectories(args, config, args.seed, "cpu")[1]
    (expected,), _ = vae.measure(args, config, models, vae.Trajectories(*(x[None] for x in held_out)))
    logged = lines_of(Path(figures["checkpoint"]).parent)[-1]
    for name, tag in vae.TAGS.items():
        for figure in ("nll", "top1"):
            assert logged[f"{tag}/{figure}"] == pytest.approx(expected[name][figure], rel=1e-4)
            assert figures[f"{name}/{figure}"] == pytest.approx(expected[name][figure], rel=1e-4)


def test_classifier_metrics_by_hand():
    probs = np.zeros((5, 7))
    probs[0, [0, 1, 2]] = 0.8, 0.15, 0.05  # right
    probs[1, [0, 1, 2]] = 0.7, 0.25, 0.05  # the truth comes second
    probs[2, [1, 3]] = 0.5, 0.5  # a tie, half right
    probs[3, [1, 3]] = 0.5, 0.5  # the other half
    probs[4, [0, 4, 5, 6]] = 0.45, 0.3, 0.15, 0.1  # the truth comes fourth
    action = np.array([0, 1, 1, 3, 6])
    confusion = vae.confusion_matrix(probs, action)
    figures = vae.classifier_figures(probs, action, confusion)
    votes = {(0, 0): 1, (1, 0): 1, (1, 1): 0.5, (1, 3): 0.5, (3, 1): 0.5, (3, 3): 0.5, (6, 0): 1}
    assert {cell: confusion[cell] for cell in votes} == votes and confusion.sum() == 5
    expected = {
        "top1": 2 / 5,  # argmax takes the first of a tie
        "top3": 4 / 5,
        "nll": -(math.log(0.8) + math.log(0.25) + 2 * math.log(0.5) + math.log(0.1)) / 5,
        **{"count/1": 2, "recall/1": 0.25, "precision/1": 0.5, "f1/1": 2 * 0.5 / (2 + 1)},
        **{"recall/0": 1, "recall/3": 0.5, "recall/6": 0, "f1/3": 0.5, "precision/3": 0.5, "count/5": 0},
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)
    f1 = [2 * confusion[a, a] / (confusion[a].sum() + confusion[:, a].sum()) for a in (0, 1, 3, 6)]
    assert figures["macro_f1"] == pytest.approx(np.mean(f1)), "only classes that occur"
    assert math.isnan(figures["recall/5"])


def test_who_is_nearly_as_likely_shares_the_guess():
    """Within 0.1: else the order of the actions would decide who is right"""
    probs = np.zeros((2, 7))
    probs[0, [1, 2, 3]] = 0.48, 0.4, 0.12
    probs[1, [1, 2, 3]] = 0.5, 0.38, 0.12
    confusion = vae.confusion_matrix(probs, np.array([2, 3]))
    assert confusion[2].tolist() == [0, 0.5, 0.5, 0, 0, 0, 0] and confusion[3].tolist() == [0, 1, 0, 0, 0, 0, 0]


def test_interval():
    mean, half = vae.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert vae.interval([1.0])[0] == 1.0 and math.isnan(vae.interval([1.0])[1]) and math.isnan(vae.interval([])[0])
    assert vae.interval([math.nan, 2.0])[0] == 2.0


def test_probe_reads_what_is_there_and_nothing_else():
    generator = seeded(1)
    prey = torch.multinomial(torch.tensor([0.2, 0.5, 0.3]), 300, True, generator=generator)
    noise = torch.randn(300, 10, 6, generator=generator)
    weight = (torch.rand(300, 10, generator=generator) < 0.6).float()
    telling = 0.3 * noise
    telling[..., :3] += F.one_hot(prey, 3)[:, None]
    nonsense = torch.where(weight[..., None] > 0, telling, -5 * telling)  # steps that do not count teach nothing
    for goals, test, low, high in (
        (telling,) * 2 + (0.95, 1.0),
        (noise,) * 2 + (0.35, 0.6),
        (nonsense, telling, 0.9, 1),
    ):
        right = vae.probe(goals[:150], prey[:150], weight[:150], test[150:], prey[150:])
        assert low < float(right.float().mean()) <= high


def test_the_probe_never_sees_what_it_is_tested_on():
    """Fitted to games that all end with a stag, it is right where they do, whatever stands in the others"""
    config, args = PRETRAINING_CASES["two players"], small_args()
    train, held_out = played(config, 8, 1), played(config, 8, 2)
    train = train._replace(prey=torch.ones_like(train.prey))
    held_out = held_out._replace(prey=1 + torch.arange(16)[None] % 2)
    (table,), (drawn,) = vae.measure(args, config, random_models(args, config), held_out, train)
    acted = held_out.acted[0]
    for name in vae.PREDICTORS[:2]:
        assert table[name]["probe_accuracy"] == pytest.approx(float(acted[::2].sum() / acted.sum()))
        assert drawn[name]["probe_by_step"][0] == 0.5


# ---------------------------------------------------------------------------------------------------------------------
# Goals


def test_goals_are_drawn_from_their_distributions():
    torch.manual_seed(1)
    args = small_args(goal_kind="discrete", goal_dim=5)
    probs = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])
    goals = vae.sample_goal("discrete", probs.log(), vae.goal_noise(args, 20_000, device="cpu"))
    assert torch.allclose(goals.mean(0), probs, atol=0.015) and torch.allclose(goals.amax(1), torch.ones(()), atol=1e-5)
    params = torch.randn(50, 5, requires_grad=True)
    noise, weight = vae.goal_noise(args, 50, device="cpu"), torch.randn(50, 5)
    (ours,) = torch.autograd.grad((vae.sample_goal("discrete", params, noise) * weight).sum(), params)
    (expected,) = torch.autograd.grad((((params + noise) / 0.5).softmax(1) * weight).sum(), params)
    assert torch.allclose(ours, expected, atol=1e-6) and ours.abs().sum() > 1, "straight through, at temperature 0.5"
    params = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.0, -2.0, 1.0, -6.0])
    goals = vae.sample_goal("continuous", params, vae.goal_noise(small_args(), 20_000, device="cpu"))
    assert torch.allclose(goals.mean(0), params[:4], atol=0.05)
    assert torch.allclose(goals.var(0).log(), params[4:], atol=0.05)


def test_kl_is_that_of_torch():
    q, p = torch.randn(6, 8, generator=seeded(1)), torch.randn(6, 8, generator=seeded(2))
    normal, other = (distributions.Normal(x[:, :4], (0.5 * x[:, 4:]).exp()) for x in (q, p))
    expected = distributions.kl_divergence(normal, other).sum(-1)
    assert torch.allclose(vae.goal_kl("continuous", q, p), expected, atol=1e-5)
    expected = distributions.kl_divergence(*(distributions.Categorical(logits=x) for x in (q, p)))
    assert torch.allclose(vae.goal_kl("discrete", q, p), expected, atol=1e-5)


def test_discrete_goals_are_averaged_exactly():
    config, args = PRETRAINING_CASES["two players"], small_args(goal_kind="discrete")
    batch, models = whole_batch(config, played(config, 4)), random_models(args, config)
    params = torch.randn(*batch.clock.shape, 4, generator=seeded(1))
    one_draw = torch.eye(4)[0].expand(*batch.clock.shape, 1, 4)
    ours = vae.action_log_probs(args, models["moa"], batch, params, one_draw).exp()
    plain = 0.0
    for k, share in enumerate(params.softmax(-1).unbind(-1)):
        goal = torch.eye(4)[k].expand(*batch.clock.shape, 4)
        log_probs = models["moa"](batch.board, batch.walls, batch.clock, goal, batch.legal)
        plain = plain + share[..., None] * log_probs.exp()
    assert torch.allclose(ours, plain, atol=1e-5)


def gradients(value, parameters):
    found = torch.autograd.grad(value.sum(), parameters, retain_graph=True, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(found, parameters, strict=True)]
    )


@both_kinds
def test_the_loss_flag_decides_what_shapes_the_goals(goal_kind):
    config = PRETRAINING_CASES["two players"]
    data = played(config, 6)
    for loss in ("recon", "moa", "both"):
        args = small_args(loss=loss, goal_kind=goal_kind)
        models, batch = random_models(args, config), whole_batch(config, data)
        losses = vae.vae_losses(args, config, models, batch, make_noise(args, batch))
        for name, side in (("prior", "vae"), ("inference", "cvae")):
            params = models[name].params
            encoder = [p for key, p in params.items() if key.startswith(("encoder", "head"))]
            decoder = [p for key, p in params.items() if key.startswith("decoder")]
            action, recon = (gradients(losses[f"losses/{part}_{side}"], encoder) for part in ("moa", "recon"))
            assert bool((action == 0).all()) == (loss == "recon") and recon.abs().sum() > 0
            assert bool((gradients(losses["losses/total"], decoder) == 0).all()) == (loss == "moa")
            terms = args.kl_coef * gradients(losses[f"losses/kl_{side}"], encoder) + action + (loss != "moa") * recon
            total = gradients(losses["losses/total"], encoder)
            assert (total - terms).abs().max() < 1e-4 * terms.abs().max()
        for name in ("moa", "moa_prior"):
            assert gradients(losses["losses/total"], models[name].parameters()).abs().sum() > 0, "they always learn"


def test_experiments_are_independent():
    config, args = PRETRAINING_CASES["two players"], small_args()
    parts = [vae.Trajectories(*(x[:, :12] for x in played(config, 6, seed))) for seed in (1, 5)]
    data = vae.Trajectories(*(torch.cat(field) for field in zip(*parts, strict=True)))
    models, alone = (vae.make_models(args, config, seeds, torch.device("cpu")) for seeds in ([1, 2], [2]))
    batch = whole_batch(config, data)
    noise = make_noise(args, batch)
    losses = vae.vae_losses(args, config, models, batch, noise)
    losses["losses/total"][0].backward()
    assert all((p.grad[1] == 0).all() and p.grad[0].abs().sum() > 0 for p in all_parameters(models))
    second = vae.make_batch(config, parts[1], torch.arange(12)[None], batch.weight.shape[1])
    only = vae.vae_losses(args, config, alone, second, noise[:, 1:])
    for name, value in only.items():
        assert value[0].item() == pytest.approx(losses[name][1].item(), rel=1e-4), name
