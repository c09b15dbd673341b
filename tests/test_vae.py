"""Subgoals and action models: labels, what the history may contain, losses, ceilings and figures."""

import math

import numpy as np
import pytest
import reference_game as reference
import torch
from helpers import PRETRAINING_CASES, replay, seeded
from torch import distributions

import pretrain_vae as vae
from stag_hunt_env import PLAYER_PROBS, STAY, StagHuntEnv, State
from stag_hunt_env import StagHuntConfig as Config

PLAYERS = ("nearest_hare", "random", "nearest_stag")  # not in the order of PLAYER_PROBS
every_case = pytest.mark.parametrize("config", PRETRAINING_CASES.values(), ids=PRETRAINING_CASES)
both_kinds = pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])


def played(config, num_games, seed=1, players=PLAYERS):
    env = StagHuntEnv(config, 1, "cpu", seed)
    return env, vae.play_games(env, players, num_games)


def small_args(**changes):
    return vae.Args(**{"hidden": 16, "goal_dim": 4, "num_goals": 5, "device": "cpu", "players": PLAYERS, **changes})


def stacked(env, games, players=PLAYERS, limit=None):
    return vae.stack_careers([vae.careers(env, games, players, limit)])


def random_models(args, config, seeds=(1,), scale=3.0):
    models = vae.Models(args, config, list(seeds))
    with torch.no_grad():
        for p in models.parameters():
            p.mul_(scale)
    return models


def whole_batch(config, data, extra=0):
    """All careers; `extra` samples beyond those that count"""
    index = torch.arange(data.acted.shape[1]).expand(len(data.acted), -1)
    return vae.make_batch(config, data, index, int(data.acted.sum((1, 2)).max()) + extra)


# ---------------------------------------------------------------------------------------------------------------------
# Labels


def plain_careers(config, games, players, limit=None):
    n, nowhere, names = config.num_players, config.num_cells, list(PLAYER_PROBS)
    num_games, steps = games.actions.shape[:2]
    rows = [
        [{"things": [], "joint": [], "legal": [], "acted": [], "known": [], "walls": []} for _ in range(n)]
        for _ in range(num_games)
    ]
    gone = {}
    for g, t, before, actions, _, acted, _, after in replay(config, games):
        for j in range(n):
            row, ego = rows[g][j], [(j + k) % n for k in range(n)]
            cells = [before.position[s] if before.present[s] else nowhere for s in ego]
            row["things"].append(cells + [c if alive else nowhere for c, alive in zip(before.prey, before.alive, strict=True)])
            row["walls"].append([int(c in before.walls) for c in range(config.num_cells if config.max_wall_pieces else 1)])
            row["joint"].append([actions[s] for s in ego])
            row["legal"].append([a in reference.legal_actions(config, before, j) for a in range(7)])
            row["acted"].append(acted[j])
            row["known"].append([reference.player_probs(config, before, j, name) for name in players])
            if before.present[j] and not after.present[j]:
                gone[g, j, t] = actions[j] - STAY
    flat = {name: torch.tensor([career[name] for game in rows for career in game]) for name in rows[0][0]}
    count, last, took = 0, [], []
    for r in range(num_games * n):
        for t in range(steps):
            count += bool(flat["acted"][r, t])
            flat["acted"][r, t] &= limit is None or count <= limit
        last.append(max([t for t in range(steps) if flat["acted"][r, t]], default=0))
        took.append(gone.get((r // n, r % n, last[-1]), 0))
    kind = [players.index(names[k]) for game in games.kinds.tolist() for k in game]
    return flat | {"last": torch.tensor(last), "took": torch.tensor(took), "kind": torch.tensor(kind)}


def differing(ours, plain):
    return {name for name, x in plain.items() if not torch.allclose(getattr(ours, name).double(), x.double(), atol=1e-6)}


@every_case
@pytest.mark.parametrize("limit", [None, 100])
def test_careers_are_those_of_the_plain_game(config, limit):
    env, games = played(config, 12)
    plain = plain_careers(config, games, PLAYERS, limit)
    ours = vae.careers(env, games, PLAYERS, limit)
    assert set(plain) == set(vae.Careers._fields) and differing(ours, plain) == set()
    assert int(ours.acted.sum()) == (limit or int(games.acted.sum()))
    assert set(ours.took.tolist()) == {0, 1, 2} or limit, "every ending should occur"


def test_wrong_labels_would_be_noticed():
    config = PRETRAINING_CASES["walls"]
    env, games = played(config, 12)
    plain = plain_careers(config, games, PLAYERS)
    wrong = {
        "joint": games._replace(actions=games.actions.roll(1, 1)),
        "acted": games._replace(acted=torch.ones_like(games.acted)),
        "things": games._replace(states=State(*(x.roll(-1, 1) for x in games.states))),
    }
    for name, changed in wrong.items():
        assert name in differing(vae.careers(env, changed, PLAYERS), plain), name
    global_order = games.actions[:, :, None].expand(-1, -1, 3, -1).transpose(1, 2).flatten(0, 1)
    assert not torch.equal(global_order.long(), plain["joint"])


def test_batches_hold_each_sample_once_and_what_belongs_to_it():
    config = PRETRAINING_CASES["walls"]
    env, games = played(config, 6)
    data = stacked(env, games, limit=90)
    index = torch.tensor([[5, 0, 11, 3]])
    count = int(data.acted[0, index[0]].sum())
    batch = vae.make_batch(config, data, index, count + 7)
    assert batch.weight.sum() == count and batch.weight.shape == (1, count + 7)
    seen = set()
    for k in range(count):
        career, t = divmod(int(batch.place[0, k]), data.acted.shape[2])
        r = int(index[0, career])
        seen.add((r, t))
        assert data.acted[0, r, t] and float(batch.clock[0, k]) == pytest.approx(t / config.final_time)
        for name in ("things", "walls", "joint", "legal"):
            assert torch.equal(getattr(batch, name)[0, k].long(), getattr(data, name)[0, r, t].long())
        assert int(batch.place[0, batch.last[0, k]]) == career * data.acted.shape[2] + int(data.last[0, r])
        assert int(batch.action[0, k]) == int(data.joint[0, r, t, 0])
    assert len(seen) == count


def test_planes_are_what_the_observer_sees():
    for config in PRETRAINING_CASES.values():
        env, games = played(config, 5)
        data = stacked(env, games)
        batch = whole_batch(config, data)
        boards = env.observe(State(*(x[:, :-1].flatten(0, 1) for x in games.states))).flatten(2)
        career, t = batch.place[0] // config.final_time, batch.place[0] % config.final_time
        seen = boards.unflatten(0, games.actions.shape[:2])[career // config.num_players, t, career % config.num_players]
        assert torch.equal(vae.planes(config, batch)[0], seen.float())


# ---------------------------------------------------------------------------------------------------------------------
# Only steps at which j was there, only what came before


def after_leaving_changed(data, config):
    """The same careers with nonsense wherever j had left"""
    generator, left = seeded(9), ~data.acted[..., None]
    anything = torch.randint(config.num_cells, data.things.shape, generator=generator).to(torch.uint8)
    actions = torch.randint(7, data.joint.shape, generator=generator).to(torch.uint8)
    return data._replace(
        things=torch.where(left, anything, data.things),
        joint=torch.where(left, actions, data.joint),
        legal=data.legal | left,
        known=torch.where(left[..., None], torch.full_like(data.known, 1 / 7), data.known),
    )


@both_kinds
def test_steps_after_leaving_do_not_count(goal_kind):
    config, args = PRETRAINING_CASES["walls"], small_args(goal_kind=goal_kind)
    env, games = played(config, 8)
    data = stacked(env, games)
    models, found = random_models(args, config), []
    changed = after_leaving_changed(data, config)
    assert not torch.equal(changed.joint, data.joint)
    for d in (data, changed):
        batch = whole_batch(config, d, extra=60)
        noise = vae.draw_noise(args, batch.clock.shape, seeded(3))
        models.zero_grad()
        parts = vae.losses(args, config, models, batch, noise, 0.7)
        parts["total"].sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in models.parameters()])
        found.append((parts, gradient, vae.measure(args, config, models, d)[0]))
    (parts, gradient, tables), (other_parts, other_gradient, other_tables) = found
    for key, value in parts.items():
        assert torch.isfinite(value).all() and torch.allclose(value, other_parts[key], rtol=1e-5), key
    assert torch.allclose(gradient, other_gradient, atol=1e-5)
    for name in vae.PREDICTORS:
        assert tables[0][name] == pytest.approx(other_tables[0][name], abs=1e-5, nan_ok=True)
        assert tables[0][name]["count/4"] < int((data.joint[..., 0] == STAY).sum()), "the stays of those who left"


def test_losses_are_means_over_the_samples_that_count():
    config, args = PRETRAINING_CASES["two players"], small_args(kl_coef=0.25)
    env, games = played(config, 6)
    data = stacked(env, games)
    models = random_models(args, config)
    batch = whole_batch(config, data, extra=9)
    noise = vae.draw_noise(args, batch.clock.shape, seeded(3))
    with torch.no_grad():
        parts = {key: float(value) for key, value in vae.losses(args, config, models, batch, noise, 1.0).items()}
        prior, posterior, _, _, log_probs = vae.infer(args, models, batch, noise, 1.0)
    samples = [k for k in range(batch.place.shape[1]) if batch.weight[0, k]]
    slot = {int(batch.place[0, k]): k for k in samples}
    plain = {"moa_vae": 0.0, "moa_cvae": 0.0, "kl_cvae": 0.0}
    for k in samples:
        career, t = divmod(int(batch.place[0, k]), config.final_time)
        final = slot[career * config.final_time + max(u for u in range(config.final_time) if data.acted[0, career, u])]
        assert t <= int(batch.place[0, final]) % config.final_time
        for name, log_prob in zip(("moa_vae", "moa_cvae"), log_probs, strict=True):
            plain[name] -= float(log_prob[0, k, int(data.joint[0, career, t, 0])]) / len(samples)
        plain["kl_cvae"] += float(vae.divergence("continuous", posterior[0, k], prior[0, final])) / len(samples)
    assert {key: parts[key] for key in plain} == pytest.approx(plain, rel=1e-4)
    assert parts["moa_total_cvae"] == pytest.approx(parts["moa_cvae"] + 0.25 * parts["kl_cvae"], rel=1e-5)
    terms = sum(parts[f"{a}_{b}"] * (0.25 if a == "kl" else 1) for a in ("recon", "kl", "moa") for b in ("vae", "cvae"))
    assert parts["total"] == pytest.approx(terms, rel=1e-5)


def test_history_ends_before_the_step():
    config, args = Config(final_time=12), small_args()
    env, games = played(config, 6, players=("random",))
    data = stacked(env, games)
    models = random_models(args, config)

    def summaries(d):
        batch = whole_batch(config, d)
        posterior, summary = vae.infer_careers(models.inference, batch)
        grid = torch.full((2, data.acted.shape[1] * 12, summary.shape[2]), torch.nan)
        grid[0, batch.place[0]] = summary[0].detach()
        grid[1, batch.place[0], : posterior.shape[2]] = posterior[0].detach()
        return grid.unflatten(1, (-1, 12)).nan_to_num()

    before = summaries(data)
    assert (before[0, :, 0] == 0).all(), "every career starts from nothing"
    career = int(data.last[0].argmax())
    for t in (0, 3, 6):
        assert data.acted[0, career, t + 1]
        joint, things = data.joint.clone(), data.things.clone()
        joint[0, career, t] = (joint[0, career, t] + 1) % 7
        after = summaries(data._replace(joint=joint))
        same = torch.isclose(after, before, atol=1e-5).all(3)
        others = torch.arange(same.shape[1]) != career
        assert same[:, others].all() and same[:, career, : t + 1].all(), "an action is not known when it is predicted"
        assert not same[0, career, t + 1] and not same[1, career, t + 1], "but at the next step"
        things[0, career, t, 0] = (things[0, career, t, 0] + 1) % 16
        same = torch.isclose(summaries(data._replace(things=things)), before, atol=1e-5).all(3)
        assert same[:, others].all() and same[:, career, :t].all()
        assert same[0, career, t] and not same[1, career, t] and not same[0, career, t + 1]


def test_summary_adds_up_the_evidence_so_far():
    config, args = PRETRAINING_CASES["walls"], small_args()
    env, games = played(config, 5)
    models = random_models(args, config, scale=1.5)
    batch = whole_batch(config, stacked(env, games))
    with torch.no_grad():
        _, summary = vae.infer_careers(models.inference, batch)
        state = models.inference.encoder(batch.things, batch.walls)
        evidence, decay = models.inference.evidence(state, batch.joint)[0], models.inference.decay.sigmoid()[0, 0]
    slot = {int(place): k for k, place in enumerate(batch.place[0])}
    for place, k in slot.items():
        start = place - place % config.final_time
        plain = sum((decay ** (place - 1 - p) * evidence[slot[p]] for p in range(start, place)), torch.zeros_like(decay))
        assert torch.allclose(summary[0, k], plain, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Ceilings


def plain_ceilings(config, games, players):
    """{(career, t): (Bayes from history, kind known)}"""
    n, found, weights = config.num_players, {}, {}
    for g, t, before, actions, _, acted, _, _ in replay(config, games):
        for j in (j for j in range(n) if acted[j]):
            probs = [reference.player_probs(config, before, j, name) for name in players]
            belief = weights.setdefault((g, j), [1.0] * len(players))
            bayes = [sum(w * p[a] for w, p in zip(belief, probs, strict=True)) / sum(belief) for a in range(7)]
            own = probs[players.index(list(PLAYER_PROBS)[games.kinds[g, j]])]
            found[g * n + j, t] = bayes, own
            weights[g, j] = [w * p[actions[j]] for w, p in zip(belief, probs, strict=True)]
    return found


@every_case
def test_ceilings_against_plain_bayes(config):
    args, (env, games) = small_args(), played(config, 15)
    data = stacked(env, games)
    models = vae.Models(args, config, [1])
    probs, _ = vae.predictions(args, config, models, data, size=7)
    plain = plain_ceilings(config, games, PLAYERS)
    assert len(plain) == int(data.acted.sum())
    for (career, t), expected in plain.items():
        assert torch.allclose(probs[2:, 0, career, t], torch.tensor(expected), atol=1e-5)
    tables, _ = vae.measure(args, config, models, data)
    for k, name in enumerate(vae.PREDICTORS[2:]):
        own = [pair[k][data.joint[0, r, t, 0]] for (r, t), pair in plain.items()]
        assert tables[0][name]["nll"] == pytest.approx(-np.mean(np.log(own)), abs=1e-4)
    shifted, _ = vae.measure(args, config, models, data._replace(joint=data.joint.roll(1, 2)))
    for name in vae.PREDICTORS[2:]:
        assert shifted[0][name]["nll"] > tables[0][name]["nll"] + 0.5
    acted = data.acted[0]
    assert torch.allclose(probs[:, 0][:, acted].sum(2), torch.ones(()), atol=1e-4)
    assert (probs[:, 0][:, acted & ~data.legal[0, ..., 0]][..., 0] < 1e-6).all(), "illegal actions have no probability"


def trained_nll(args, config, data, held_out):
    models = vae.Models(args, config, [1])
    optimiser = torch.optim.Adam(models.parameters(), lr=args.learning_rate)
    generator, table = seeded(1), vae.symmetries(config, "cpu")
    for epoch in range(args.epochs):
        vae.train_epoch(args, config, models, optimiser, data, generator, table, epoch)
    return vae.measure(args, config, models, held_out)[0][0]


def test_only_right_labels_come_near_the_ceiling():
    """On a board of one row what a hunter does is certain, given its kind: the kind shows at its first step."""
    players = ("nearest_stag", "nearest_hare")
    config = Config(height=1, width=7, num_players=2, num_hares=1, final_time=6)
    args = small_args(players=players, epochs=8, hidden=24, batch_size=64, learning_rate=2e-2)
    env, games = played(config, 200, players=players)
    data, held_out = stacked(env, games, players), stacked(env, played(config, 100, 2, players)[1], players)
    right = trained_nll(args, config, data, held_out)
    ceiling = right["ceiling: Bayes from history"]["nll"]
    assert ceiling < right["with history"]["nll"] < ceiling + 0.3
    assert right["with history"]["nll"] < right["state only"]["nll"]
    shifted = data._replace(joint=torch.where(data.acted[..., None], data.joint.roll(1, 2), data.joint))
    legal = torch.ones_like(data.legal)  # else the wrong labels would be illegal, and noticed at once
    wrong = trained_nll(args, config, shifted._replace(legal=legal), held_out)
    assert wrong["with history"]["nll"] > right["with history"]["nll"] + 0.3


# ---------------------------------------------------------------------------------------------------------------------
# Symmetries


def moved(state, cells):
    """The same games on the board seen in a mirror or turned"""
    position, prey = (cells[x.long()].to(x.dtype) for x in (state.position, state.prey_position))
    walls = torch.zeros_like(state.walls)
    walls[..., cells[:-1]] = state.walls
    return state._replace(position=position, prey_position=prey, walls=walls)


@every_case
def test_symmetries_commute_with_the_game(config):
    env, games = played(config, 20)
    cells, actions = vae.symmetries(config, "cpu")
    count = 8 if config.height == config.width else 4
    assert len(cells) == len(actions) == count == len({tuple(c) for c in cells.tolist()})
    before = State(*(x[:, :-1].flatten(0, 1) for x in games.states))
    played_actions = torch.randint(7, before.position.shape, generator=seeded(1))
    after, reward, acted, done = env.transition(before, played_actions)
    for to, act in zip(cells, actions, strict=True):
        new_after, new_reward, new_acted, new_done = env.transition(moved(before, to), act[played_actions])
        for name, ours, expected in zip(State._fields, new_after, moved(after, to), strict=True):
            assert torch.equal(ours, expected), name
        assert torch.equal(new_reward, reward) and torch.equal(new_acted, acted) and torch.equal(new_done, done)
        assert torch.equal(env.legal_actions(moved(before, to))[..., act], env.legal_actions(before))


@every_case
def test_batches_in_a_symmetry_are_those_of_the_turned_games(config):
    env, games = played(config, 6)
    data = stacked(env, games)
    cells, actions = vae.symmetries(config, "cpu")
    index = torch.arange(data.acted.shape[1])[None]
    count = int(data.acted.sum())
    for s, (to, act) in enumerate(zip(cells, actions, strict=True)):
        turned = vae.make_batch(config, data, index, count, (cells, actions, torch.full_like(index, s)))
        new_actions = act[games.actions.long()].to(torch.uint8)
        other = stacked(env, games._replace(states=moved(games.states, to), actions=new_actions))
        for name, ours, expected in zip(vae.Batch._fields, turned, whole_batch(config, other), strict=True):
            assert ours == expected if isinstance(ours, int) else torch.equal(ours, expected), name


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def test_classifier_metrics_by_hand():
    probs = np.zeros((5, 7))
    probs[0, [0, 1, 2]] = 0.8, 0.15, 0.05  # right
    probs[1, [0, 1, 2]] = 0.7, 0.25, 0.05  # the truth comes second
    probs[2, [1, 3]] = 0.5, 0.5  # a tie, half right
    probs[3, [1, 3]] = 0.5, 0.5  # the other half
    probs[4, [0, 4, 5, 6]] = 0.4, 0.3, 0.2, 0.1  # the truth comes fourth
    figures, confusion = vae.classifier_metrics(probs, np.array([0, 1, 1, 3, 6]))
    votes = {(0, 0): 1, (1, 0): 1, (1, 1): 0.5, (1, 3): 0.5, (3, 1): 0.5, (3, 3): 0.5}
    row = confusion[6] * 1
    for (true, guess), value in votes.items():
        assert confusion[true, guess] == value
    assert row.sum() == 1 and row[0] >= 0.5 and confusion.sum() == 5
    expected = {
        "top1": (1 + 0.5 + 0.5) / 5,
        "top3": 4 / 5,
        "nll": -(math.log(0.8) + math.log(0.25) + 2 * math.log(0.5) + math.log(0.1)) / 5,
        # bins of 1/15: 0.8 (right), 0.7 (wrong), 0.5 twice (one right), 0.4 (wrong)
        "ece": (0.2 + 0.7 + abs(1.0 - 1) + 0.4) / 5,
        **{"count/1": 2, "share/1": 0.4, "recall/1": 0.25, "precision/1": 0.5, "f1/1": 2 * 0.5 / (2 + 1)},
        **{"recall/0": 1, "recall/3": 0.5, "recall/6": 0, "f1/3": 0.5, "precision/3": 0.5, "count/5": 0},
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)
    f1 = [2 * confusion[a, a] / (confusion[a].sum() + confusion[:, a].sum()) for a in (0, 1, 3, 6)]
    assert figures["macro_f1"] == pytest.approx(np.mean(f1)), "only classes that occur"
    assert math.isnan(figures["recall/5"])


def test_top1_splits_ties_as_recall_does():
    probs = np.full((3, 7), 0.01)
    probs[:, [1, 3, 4]] = 0.35, 0.32, 0.28  # a tie of three, within 0.1
    for action, expected in ((1, 1 / 3), (3, 1 / 3), (4, 1 / 3), (0, 0.0)):
        figures, _ = vae.classifier_metrics(probs, np.full(3, action))
        assert figures["top1"] == pytest.approx(expected) == pytest.approx(figures[f"recall/{action}"])
    probs, action = np.random.default_rng(0).dirichlet(np.ones(7), 500), np.arange(500) % 7
    figures, _ = vae.classifier_metrics(probs, action)
    weighed = sum(figures[f"recall/{a}"] * figures[f"share/{a}"] for a in range(7))
    assert figures["top1"] == pytest.approx(weighed), "the mean recall, each action as often as it occurs"
    assert np.isnan(vae.votes(np.full((2, 7), math.nan))).all()


def test_by_step():
    values = vae.by_step(np.array([1.0, 0.0, 1.0]), np.array([0, 0, 2]), 4)
    assert values[[0, 2]].tolist() == [0.5, 1.0] and np.isnan(values[[1, 3]]).all()


def test_interval():
    mean, half = vae.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert vae.interval([1.0])[0] == 1.0 and math.isnan(vae.interval([1.0])[1]) and math.isnan(vae.interval([])[0])
    assert vae.interval([math.nan, 2.0])[0] == 2.0
    for count, t in ((2, 12.706), (16, 2.131), (17, 2.120), (40, 2.023), (1000, 1.962)):
        values = np.random.default_rng(count).normal(size=count)
        _, half = vae.interval(values.tolist())
        assert half == pytest.approx(t * values.std(ddof=1) / math.sqrt(count), rel=5e-4)


@both_kinds
def test_predictions_average_over_goals(goal_kind):
    """Goals have their weights: those of a model that is sure of its goal are the prediction for that goal."""
    config, args = Config(), small_args(goal_kind=goal_kind)
    parameters = torch.full((1, 3, 8 if goal_kind == "continuous" else 5), -60.0)
    parameters[..., 2] = 40.0
    mean, drawn = vae.spread_goals(args, parameters, seeded(0))
    assert sum(float(torch.as_tensor(w).mean()) for _, w in drawn) == pytest.approx(1, abs=1e-5)
    average = sum(goal * w for goal, w in drawn)
    assert torch.allclose(average, mean, atol=0.1)
    assert mean.shape[-1] == vae.goal_size(args) and config.num_players == 4


# ---------------------------------------------------------------------------------------------------------------------
# Goals


def test_discrete_goals_are_one_hot_and_pass_gradients():
    args = small_args(goal_kind="discrete")
    parameters = torch.randn(2, 50, 5, generator=seeded(1), requires_grad=True)
    noise = vae.draw_noise(args, (2, 50), seeded(2))[0]
    goal = vae.draw_goal("discrete", parameters, noise, 0.5)
    assert torch.allclose(goal.detach(), torch.nn.functional.one_hot((parameters + noise).argmax(-1), 5).float(), atol=1e-6)
    weight = torch.randn(goal.shape, generator=seeded(3))
    (ours,) = torch.autograd.grad((goal * weight).sum(), parameters)
    (soft,) = torch.autograd.grad((((parameters + noise) / 0.5).softmax(-1) * weight).sum(), parameters)
    assert torch.allclose(ours, soft, atol=1e-6) and ours.abs().sum() > 1


def test_gumbel_noise_draws_the_categories_by_their_probability():
    args = small_args(goal_kind="discrete")
    probs = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])
    goals = vae.draw_goal("discrete", probs.log(), vae.draw_noise(args, (20_000,), seeded(1))[0], 1.0)
    assert torch.allclose(goals.mean(0), probs, atol=0.015)


def test_continuous_goals_have_their_mean_and_spread():
    args = small_args()
    parameters = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.0, -2.0, 1.0, -6.0])
    goals = vae.draw_goal("continuous", parameters, vae.draw_noise(args, (20_000,), seeded(1))[0], 1.0)
    assert torch.allclose(goals.mean(0), parameters[:4], atol=0.05)
    assert torch.allclose(goals.var(0).log(), parameters[4:], atol=0.05)


def test_divergence_is_that_of_torch():
    q, p = torch.randn(6, 8, generator=seeded(1)), torch.randn(6, 8, generator=seeded(2))
    normals = [distributions.Normal(x[:, :4], (0.5 * x[:, 4:]).exp()) for x in (q, p, torch.zeros_like(q))]
    classes = [distributions.Categorical(logits=x) for x in (q, p, torch.zeros_like(q))]
    for kind, (a, b, standard) in (("continuous", normals), ("discrete", classes)):
        expected = distributions.kl_divergence(a, b)
        assert torch.allclose(vae.divergence(kind, q, p), expected.sum(-1) if kind == "continuous" else expected, atol=1e-5)
        expected = distributions.kl_divergence(a, standard)
        assert torch.allclose(vae.divergence(kind, q), expected.sum(-1) if kind == "continuous" else expected, atol=1e-5)


def test_probe_reads_what_is_there_and_nothing_else():
    generator = seeded(1)
    took = torch.tensor([0, 1, 2])[torch.multinomial(torch.tensor([0.2, 0.5, 0.3]), 300, True, generator=generator)]
    noise = torch.randn(300, 10, 6, generator=generator)
    weight = (torch.rand(300, 10, generator=generator) < 0.6).float()
    telling = 0.3 * noise
    telling[..., :3] += torch.nn.functional.one_hot(took, 3)[:, None]
    unseen = took[150:]
    for goals, low, high in ((telling, 0.95, 1.0), (noise, 0.35, 0.6)):
        right = vae.probe(goals[:150], took[:150], weight[:150], (goals[150:], unseen))
        assert low < float(right.float().mean()) <= high
    nonsense = torch.where(weight[..., None] > 0, telling, -5 * telling)
    right = vae.probe(nonsense[:150], took[:150], weight[:150], (telling[150:], unseen))
    assert float(right.float().mean()) > 0.9, "steps that do not count teach nothing"


def gradients(value, parameters):
    found = torch.autograd.grad(value.sum(), list(parameters), retain_graph=True, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(found, parameters, strict=True)])


@both_kinds
def test_the_loss_flag_decides_what_shapes_the_goals(goal_kind):
    config = PRETRAINING_CASES["two players"]
    env, games = played(config, 6)
    data = stacked(env, games)
    for loss in ("recon", "moa", "both"):
        args = small_args(loss=loss, goal_kind=goal_kind)
        models = random_models(args, config)
        batch = whole_batch(config, data)
        parts = vae.losses(args, config, models, batch, vae.draw_noise(args, batch.clock.shape, seeded(1)), 1.0)
        for encoder, decoder, name in (
            ([*models.prior.encoder.parameters(), *models.prior.head.parameters()], models.prior.decoder, "vae"),
            ([*models.inference.encoder.parameters(), *models.inference.head.parameters()], models.inference.decoder, "cvae"),
        ):
            action, shape = gradients(parts[f"moa_{name}"], encoder), gradients(parts["total"], encoder)
            recon = gradients(parts[f"recon_{name}"], encoder)
            assert bool((action == 0).all()) == (loss == "recon")
            decoding = gradients(parts["total"], list(decoder.parameters()))
            assert bool((decoding == 0).all()) == (loss == "moa")
            assert torch.isfinite(shape).all() and recon.abs().sum() > 0
            terms = args.kl_coef * gradients(parts[f"kl_{name}"], encoder) + action + (0 if loss == "moa" else 1) * recon
            assert torch.allclose(shape, terms, rtol=1e-3, atol=1e-6)
        heads = [gradients(parts["total"], list(m.parameters())).abs().sum() for m in (models.moa, models.moa_state)]
        assert min(heads) > 0, "the action models always learn"


def test_experiments_are_independent():
    config, args = PRETRAINING_CASES["two players"], small_args()
    env, games = played(config, 6)
    other = played(config, 6, seed=5)[1]
    data = vae.stack_careers([vae.careers(env, g, PLAYERS, 60) for g in (games, other)])
    models, alone = vae.Models(args, config, [1, 2]), vae.Models(args, config, [2])
    batch = whole_batch(config, data)
    noise = vae.draw_noise(args, batch.clock.shape, seeded(1))
    parts = vae.losses(args, config, models, batch, noise, 1.0)
    parts["total"][0].backward()
    assert all((p.grad[1] == 0).all() for p in models.parameters() if p.grad is not None)
    second = vae.Careers(*(x[1:] for x in data))
    only = vae.losses(args, config, alone, whole_batch(config, second), [e[1:] for e in noise], 1.0)
    for key, value in only.items():
        assert value[0].item() == pytest.approx(parts[key][1].item(), rel=1e-4), key


def test_stacking_careers_of_unequal_numbers():
    config = PRETRAINING_CASES["two players"]
    env, games = played(config, 30)
    short, long = (vae.careers(env, games, PLAYERS, limit) for limit in (20, 200))
    data = vae.stack_careers([short, long])
    assert data.acted.sum((1, 2)).tolist() == [20, 200]
    for s, part in enumerate((short, long)):
        rows = data.acted.shape[1]
        assert torch.equal(data.joint[s][data.acted[s]], part.joint[:rows][part.acted[:rows]])
