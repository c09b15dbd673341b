"""Subgoals and action models: labels, what the history may contain, losses, ceilings and figures."""

import math

import pretrain_vae as vae
from stag_hunt_env import STAY, StagHuntEnv, State
from stag_hunt_env import StagHuntConfig as Config

import numpy as np
import pytest
import reference_game as reference
import torch
from helpers import PRETRAINING_CASES, Recorded, lines_of, record_games, replay, seeded
from torch.nn import functional as F

PLAYERS = "nearest_hare,random,nearest_stag"  # not in the order of PLAYER_PROBS
KINDS = {"prior": vae.SubgoalPrior, "inference": vae.SubgoalInference}
KINDS |= {"moa": vae.ActionModel, "moa_prior": vae.ActionModel}
TWO = PRETRAINING_CASES["two players"]
WALLS = PRETRAINING_CASES["walls"]
SQUARE = Config(height=4, width=4, num_players=2, num_hares=2, max_wall_pieces=2, final_time=8)
every_case = pytest.mark.parametrize("config", PRETRAINING_CASES.values(), ids=PRETRAINING_CASES)
both_kinds = pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])


def small_args(config=TWO, **changes):
    flags = {"subgoal_hidden": 16, "goal_dim": 4, "device": "cpu", "population": PLAYERS}
    return vae.Args(config=config, **flags | changes)


def played(args, num_games, seed=1):
    """[1, R, T, ...]"""
    torch.manual_seed(seed)
    env = StagHuntEnv(args.config, num_games, "cpu", seed)
    return vae.trajectories([vae.play_games(args, env)])


def random_networks(args, seeds=(1,), scale=3.0):
    networks = {}
    for number, (name, kind) in enumerate(KINDS.items()):
        networks[name] = vae.Stacked(kind, args, [4 * seed + number for seed in seeds], torch.device("cpu"))
    for p in all_parameters(networks):
        p.data.mul_(scale)
    return networks


def all_parameters(networks):
    return [p for network in networks.values() for p in network.params.values()]


def seeded_losses(args, networks, batch):
    torch.manual_seed(3)
    return vae.vae_losses(args, networks, batch)


# ---- Labels


def plain_trajectories(config, games, population):
    """The same from plain loops over the plain-Python game, with Bayes' rule over the population"""
    n = config.num_players
    rows = [
        {name: [] for name in ("board", "joint", "legal", "acted", "likely")} for _ in range(len(games.actions) * n)
    ]
    weights = [[1.0] * len(population) for _ in rows]
    for g, _, before, actions, _, acted, _, _ in replay(config, games):
        for j in range(n):
            row, belief, ego = rows[g * n + j], weights[g * n + j], [(j + k) % n for k in range(n)]
            cells = [before.position[s] if before.present[s] else config.num_cells for s in ego]
            prey = [c if alive else config.num_cells for c, alive in zip(before.prey, before.alive, strict=True)]
            walls = [c in before.walls for c in range(config.num_wall_cells)]
            row["board"].append(cells + prey + walls)
            row["joint"].append([actions[s] for s in ego])
            row["legal"].append([a in reference.legal_actions(config, before, j) for a in range(7)])
            row["acted"].append(acted[j])
            probs = [reference.player_probs(config, before, j, name) for name in population]
            row["likely"].append((probs, [w / sum(belief) for w in belief]))
            if acted[j]:
                weights[g * n + j] = [w * p[actions[j]] for w, p in zip(belief, probs, strict=True)]
    return rows


@every_case
def test_trajectories_are_those_of_the_plain_game(config):
    torch.manual_seed(1)
    env = StagHuntEnv(config, 12, "cpu", 1)
    played, games = record_games(env, lambda env: vae.play_games(small_args(config), env))
    ours = {name: x[0] for name, x in vae.trajectories([played]).items()}
    rows = plain_trajectories(config, games, PLAYERS.split(","))
    for name in ("board", "joint", "legal", "acted"):
        assert torch.equal(ours[name].long(), torch.tensor([row[name] for row in rows]).long()), name
    kinds = set()
    for r, t in ours["acted"].nonzero().tolist():
        probs, belief = rows[r]["likely"][t]
        bayes = [sum(w * p[a] for w, p in zip(belief, probs, strict=True)) for a in range(7)]
        assert torch.allclose(ours["moa/bayes"][r, t], torch.tensor(bayes), atol=1e-5)
        same = [k for k, p in enumerate(probs) if np.allclose(p, ours["moa/ceiling"][r, t], atol=1e-6)]
        assert same, "somebody of the population"
        kinds |= set(same) if len(same) == 1 else set()
    assert kinds == {0, 1, 2}
    assert 0 < int(ours["acted"].sum()) < ours["acted"].numel()


def test_batches_hold_each_sample_once_and_what_belongs_to_it():
    """Of two seeds, of which one has fewer samples"""
    parts = [played(small_args(WALLS), 4, seed) for seed in (1, 2)]
    data = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    batch = vae.make_batch(WALLS, data)
    counts = data["acted"].sum((1, 2)).tolist()
    assert batch["weight"].shape[1] == max(counts) > min(counts)
    assert batch["weight"].sum(1).tolist() == counts
    for seed, count in enumerate(counts):
        place = data["acted"][seed].nonzero().tolist()
        assert len(place) == count
        for k, (r, t) in enumerate(place):
            assert float(batch["clock"][seed, k]) == pytest.approx(t / WALLS.final_time)
            for name in ("board", "joint", "legal"):
                assert torch.equal(batch[name][seed, k].long(), data[name][seed, r, t].long())
            last = max(u for u in range(WALLS.final_time) if data["acted"][seed, r, u])
            assert place[int(batch["last"][seed, k])] == [r, last]


@pytest.mark.parametrize("config", [*PRETRAINING_CASES.values(), SQUARE], ids=[*PRETRAINING_CASES, "square"])
def test_symmetries_commute_with_the_game(config):
    args = small_args(config)
    env = StagHuntEnv(config, 20, "cpu", 1)
    _, games = record_games(env, lambda env: vae.play_games(args, env))
    cells, actions = vae.symmetries(config, "cpu")
    assert len({tuple(c) for c in cells.tolist()}) == len(actions) == (8 if config.height == config.width else 4)
    before = State(*(x[:, :-1].flatten(0, 1) for x in games.states))
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

    data = played(args, 6)
    which = torch.arange(data["acted"].shape[1])[None] % len(cells)
    turned = vae.turn(config, data, (cells, actions), which)
    size = config.num_players + config.num_prey
    for r, number in enumerate(which[0].tolist()):
        to, act = cells[number], actions[number]
        of_row = {name: x[0, r].long() for name, x in data.items()}
        new = {name: x[0, r].long() for name, x in turned.items()}
        assert torch.equal(new["board"][:, :size], to[of_row["board"][:, :size]])
        assert torch.equal(new["joint"], act[of_row["joint"]])
        assert torch.equal(new["legal"][:, act], of_row["legal"])
        if config.max_wall_pieces:
            assert torch.equal(new["board"][:, size:][:, to[:-1]], of_row["board"][:, size:])


# ---- Only steps at which j was there, only what came before


def test_losses_are_means_over_the_samples_that_count():
    """Of two seeds: one has fewer samples"""
    args = small_args(kl_coef=0.25)
    parts = [played(args, games, seed) for games, seed in ((6, 1), (6, 2))]
    parts[1]["acted"][:, 0] = False
    data = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    networks = random_networks(args, (1, 2))
    batch = vae.make_batch(TWO, data)
    with torch.no_grad():
        losses = seeded_losses(args, networks, batch)
        prior, posterior, history = vae.infer_subgoals(networks, batch)
        torch.manual_seed(3)
        noise = torch.randn(2, *prior.shape[:2], args.goal_dim)
        goals = [vae.sample_goal(args, p, e) for p, e in zip((prior, posterior), noise, strict=True)]
        inputs = [(batch["board"], batch["clock"], goal, batch["legal"]) for goal in goals]
        log_probs = [networks[name](*x) for name, x in zip(("moa_prior", "moa"), inputs, strict=True)]
        reads = goals[0], torch.cat([goals[1], vae.scale_history(history)], 2)
        states = [networks[name](x, method="decoder") for name, x in zip(("prior", "inference"), reads, strict=True)]
    for seed in range(2):
        plain = dict.fromkeys(losses.keys() - {"total"}, 0.0)
        places = data["acted"][seed].nonzero().tolist()
        for k, (r, t) in enumerate(places):
            last = max(i for i, (row, _) in enumerate(places) if row == r)
            action = int(data["joint"][seed, r, t, 0])
            planes = torch.zeros(args.config.num_players + 3, args.config.num_cells)
            for entity, cell in enumerate(data["board"][seed, r, t, :-1].tolist()):
                if cell < TWO.num_cells:
                    planes[entity if entity < 2 else 3 if entity == 2 else 4, cell] = 1
            for side, log_prob, logits in zip(("vae", "cvae"), log_probs, states, strict=True):
                plain[f"moa_{side}"] -= float(log_prob[seed, k, action]) / len(places)
                error = F.binary_cross_entropy_with_logits(logits[seed, k], planes.flatten())
                plain[f"recon_{side}"] += float(error) / len(places)
            plain["kl_cvae"] += float(vae.goal_kl(args, posterior[seed, k], prior[seed, last])) / len(places)
            plain["kl_vae"] += float(vae.goal_kl(args, prior[seed, k], torch.zeros(8))) / len(places)
        ours = {name: float(x[seed]) for name, x in losses.items()}
        total = ours.pop("total")
        assert ours == pytest.approx(plain, rel=1e-4)
        assert total == pytest.approx(sum(x * (0.25 if name.startswith("kl") else 1) for name, x in plain.items()))


def test_history_adds_up_the_events_so_far():
    args = small_args(WALLS)
    networks = random_networks(args, scale=1.5)
    data = played(args, 5)
    batch, inference = vae.make_batch(WALLS, data), networks["inference"]
    with torch.no_grad():
        _, _, history = vae.infer_subgoals(networks, batch)
        event = inference(inference(batch["board"], method="encoder"), batch["joint"], method="event")[0]
    places = data["acted"][0].nonzero().tolist()
    for k, (r, t) in enumerate(places):
        earlier = [event[i] for i, (row, step) in enumerate(places) if row == r and step < t]
        plain = sum(earlier, torch.zeros_like(event[0]))
        now, before = history[0, k].chunk(2)
        assert torch.allclose(now, plain, atol=1e-4, rtol=1e-4)
        assert now[0] == len(earlier), "the first entry counts"
        assert not before.any(), "of earlier games nothing is known"


# ---- Training


def untrained_epoch(args, data, epoch):
    """An epoch with steps too small to matter -> losses, boards seen [n, X]"""
    networks = random_networks(args)
    optimizer = torch.optim.Adam(all_parameters(networks), fused=True)
    networks["prior"] = Recorded(networks["prior"])
    losses = vae.train_epoch(args, networks, optimizer, data, epoch)
    return losses, torch.cat([inputs[0] for method, inputs in networks["prior"].seen if method == "forward"], 1)[0]


def test_every_epoch_shows_all_samples_once_in_an_order_of_its_own():
    """And draws its own subgoals; its losses are means over all samples"""
    args = small_args(learning_rate=1e-30, batch_size=72, augment=False)  # of 80 trajectories: the last batch is small
    data = played(args, 40)
    all_boards = sorted(data["board"][data["acted"]].float().tolist())
    (losses, first), (other_losses, second), (_, again) = (untrained_epoch(args, data, epoch) for epoch in (0, 1, 0))
    assert sorted(first.tolist()) == sorted(second.tolist()) == all_boards
    assert (first != second).any(1).float().mean() > 0.8
    assert torch.equal(first, again)
    with torch.no_grad():
        expected = seeded_losses(args, random_networks(args), vae.make_batch(TWO, data))
    for name in losses.keys() - {"total"}:
        without_noise = name in ("kl_vae", "kl_cvae")
        assert (losses[name] == pytest.approx(expected[name].tolist(), rel=1e-4)) == without_noise, name
        assert (losses[name] == pytest.approx(other_losses[name], rel=1e-4)) == without_noise, name


def test_boards_are_turned_by_one_symmetry_in_four():
    args = small_args(learning_rate=1e-30, batch_size=32)
    data = played(args, 40)
    cells, _ = vae.symmetries(TWO, "cpu")

    def turned_alike(boards):  # each in the one of its symmetries that comes first
        return sorted(min(tuple(to[board[:-1]].tolist()) for to in cells) for board in boards.long())

    (_, turned), (_, otherwise) = (untrained_epoch(args, data, epoch) for epoch in (0, 1))
    boards = data["board"][data["acted"]]
    assert turned_alike(turned) == turned_alike(boards)
    unchanged = {tuple(board) for board in boards.tolist()}
    assert 0.1 < np.mean([tuple(board) in unchanged for board in turned.tolist()]) < 0.5
    assert sorted(turned.tolist()) != sorted(otherwise.tolist())


def test_right_labels_come_near_the_ceiling():
    """On a board of one row what a hunter does is certain, given its kind: the kind shows at its first step."""
    config = Config(height=1, width=7, num_players=2, num_hares=1, final_time=6)
    flags = {"epochs": 6, "subgoal_hidden": 24, "batch_size": 64, "learning_rate": 2e-2}
    args = small_args(config, **flags, population="nearest_stag,nearest_hare")
    data, held_out = (played(args, *size) for size in ((150, 1), (100, 2)))
    networks = random_networks(args, scale=1.0)
    optimizer = torch.optim.Adam(all_parameters(networks), fused=True)
    for epoch in range(args.epochs):
        vae.train_epoch(args, networks, optimizer, data, epoch)
    (table,) = vae.measure(args, networks, held_out)
    # With labels shifted by one step it is 1.6, with the state alone 0.17 above the ceiling.
    assert table["moa/bayes"]["nll"] < table["moa"]["nll"] < table["moa/bayes"]["nll"] + 0.2
    assert table["moa"]["nll"] < table["moa_prior"]["nll"]


# ---- Figures


def test_figures_are_those_of_held_out_games(tmp_path, no_pictures):
    """In each epoch of the first thousand trajectories, at the end of all"""
    args = small_args(num_samples=300, held_out_games=600, epochs=1, run_dir=str(tmp_path))
    vae.main(args)
    (folder,) = tmp_path.iterdir()
    networks = random_networks(args)
    saved = vae.load_checkpoint(folder, vae.FORMAT)["networks"]
    assert saved.keys() == networks.keys()
    for name, weights in saved.items():
        networks[name].network.load_state_dict(weights)
    held_out = vae.trajectories([vae.collect(args, args.num_samples, args.seed, "cpu")[1]])
    logged = lines_of(folder)[-1]
    final = np.load(folder / "evaluation" / "final.npz")
    for found, count in ((logged, 1000), (final, 1200)):
        (expected,) = vae.measure(args, networks, {name: x[:, :count] for name, x in held_out.items()})
        for name, figures in expected.items():
            assert figures["count"].sum() == held_out["acted"][:, :count].sum()
            for figure in vae.FIGURES:
                assert found[f"{name}/{figure}"] == pytest.approx(figures[figure], rel=1e-4)


def test_classifier_metrics_by_hand():
    probs = np.zeros((5, 7))
    probs[0, [0, 1, 2]] = 0.8, 0.15, 0.05  # right
    probs[1, [0, 1, 2]] = 0.7, 0.25, 0.05  # the truth comes second
    probs[2, [1, 3]] = 0.5, 0.5  # a tie, half right
    probs[3, [1, 3]] = 0.5, 0.5  # the other half
    probs[4, [0, 4, 5, 6]] = 0.45, 0.3, 0.15, 0.1  # the truth, to stay, comes second
    figures = vae.classify(probs, np.array([0, 1, 1, 3, STAY]))
    confusion = np.zeros((7, 7))
    for place, votes in {(0, 0): 1, (1, 0): 1, (1, 1): 0.5, (1, 3): 0.5, (3, 1): 0.5, (3, 3): 0.5, (4, 0): 1}.items():
        confusion[place] = votes
    np.testing.assert_array_equal(figures["confusion"], confusion)
    assert figures["top1"] == 2 / 5, "argmax takes the first of a tie"
    assert figures["top3"] == 1.0
    nll = -(math.log(0.8) + math.log(0.25) + 2 * math.log(0.5) + math.log(0.3)) / 5
    assert figures["nll"] == pytest.approx(nll)
    nan = math.nan
    expected = {
        "count": [1, 2, 0, 1, 1, 0, 0],
        "precision": [1 / 3, 0.5, nan, 0.5, nan, nan, nan],
        "recall": [1, 0.25, nan, 0.5, 0, nan, nan],
        "f1": [0.5, 1 / 3, 0, 0.5, 0, 0, 0],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(figures[name], values)
    assert figures["macro_f1"] == pytest.approx((0.5 + 1 / 3 + 0.5 + 0) / 4), "only actions that occur"
    assert figures["recall_without_stay"] == pytest.approx((1 + 0.25 + 0.5) / 3)
    # Who is nearly as likely, within 0.1, shares the guess: else the order of the actions would decide who is right
    nearly = vae.classify(np.array([[0, 0.48, 0.4, 0.12, 0, 0, 0], [0, 0.5, 0.38, 0.12, 0, 0, 0]]), np.array([2, 3]))
    assert nearly["confusion"][2:4].tolist() == [[0, 0.5, 0.5, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]]


# ---- Goals


def test_discrete_goals_are_averaged_exactly():
    args = small_args(goal_kind="discrete")
    batch, moa = vae.make_batch(TWO, played(args, 4)), random_networks(args)["moa"]
    shape = batch["clock"].shape
    distribution = torch.randn(*shape, 4, generator=seeded(1))
    one_draw = torch.eye(4)[0].expand(*shape, 1, 4)
    ours = vae.action_log_probs(args, moa, batch, distribution, one_draw).exp()
    plain = 0.0
    for k, share in enumerate(distribution.softmax(-1).unbind(-1)):
        goal = torch.eye(4)[k].expand(*shape, 4)
        plain = plain + share[..., None] * moa(batch["board"], batch["clock"], goal, batch["legal"]).exp()
    assert torch.allclose(ours, plain, atol=1e-5)


def gradients(value, parameters):
    found = torch.autograd.grad(value.sum(), parameters, retain_graph=True, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
    return torch.cat([g.flatten() for g in found])


@both_kinds
@pytest.mark.parametrize("loss", ["recon", "moa", "both"])
def test_the_loss_flag_decides_what_shapes_the_goals(loss, goal_kind):
    args = small_args(loss=loss, goal_kind=goal_kind)
    networks = random_networks(args)
    losses = seeded_losses(args, networks, vae.make_batch(TWO, played(args, 6)))
    for name, side in (("prior", "vae"), ("inference", "cvae")):
        params = networks[name].params
        encoder = [p for key, p in params.items() if key.startswith(("encoder", "head"))]
        decoder = [p for key, p in params.items() if key.startswith("decoder")]
        action, recon = (gradients(losses[f"{part}_{side}"], encoder) for part in ("moa", "recon"))
        assert bool((action == 0).all()) == (loss == "recon")
        assert recon.abs().sum() > 0
        assert bool((gradients(losses["total"], decoder) == 0).all()) == (loss == "moa")
        terms = args.kl_coef * gradients(losses[f"kl_{side}"], encoder) + action + (loss != "moa") * recon
        assert (gradients(losses["total"], encoder) - terms).abs().max() < 1e-4 * terms.abs().max()
    prior = [*networks["prior"].params.values()]
    assert (gradients(losses["kl_cvae"], prior) == 0).all(), "the hindsight subgoal does not move f_psi"
    for name in ("moa", "moa_prior"):
        assert gradients(losses["total"], [*networks[name].params.values()]).abs().sum() > 0, "they always learn"
