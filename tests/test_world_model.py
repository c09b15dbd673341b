"""World model: labels, what the structured head cannot predict, and how predictions are measured."""

import dataclasses
import math

import pretrain_world_model as wm
from stag_hunt_env import HUNT_HARE, HUNT_STAG, STAY, StagHuntEnv
from stag_hunt_env import StagHuntConfig as Config

import numpy as np
import pytest
import reference_game as reference
import torch
from helpers import PRETRAINING_CASES, Recorded, lines_of, planes_of, record_games, replay, seeded
from torch.utils._pytree import tree_map

TWO = PRETRAINING_CASES["two players"]
WALLS = PRETRAINING_CASES["walls"]
every_case = pytest.mark.parametrize("config", PRETRAINING_CASES.values(), ids=PRETRAINING_CASES)


def small_args(config=TWO, **changes):
    return wm.Args(config=config, **{"wm_hidden": 16, "device": "cpu", **changes})


def played(args, num_games, seed=1):
    """[G, T, N, ...]"""
    torch.manual_seed(seed)
    return wm.play_games(args, StagHuntEnv(args.config, num_games, "cpu", seed))


def dataset(args, num_games, seed=1):
    """[1, n, ...]"""
    return wm.transitions([played(args, num_games, seed)])


def make_model(args, seeds=(1,), scale=None):
    """Stacked world models, `scale`: with normally distributed weights instead of small ones"""
    kind = wm.WorldModel if args.wm_head == "structured" else wm.PixelWorldModel
    world = wm.Stacked(kind, args, list(seeds), torch.device("cpu"))
    if scale is not None:
        for p in world.params.values():
            p.data.copy_(scale * torch.randn(p.shape, generator=seeded(seeds[0])))
    return world


# ---- Labels


def plain_transitions(config, games):
    """The same from plain loops over the plain-Python game, and the planes before and after"""
    rows, planes, n = [], [], config.num_players

    def board(state, i):
        ego = [(i + k) % n for k in range(n)]
        players = [state.position[s] if state.present[s] else config.num_cells for s in ego]
        prey = [cell if alive else config.num_cells for cell, alive in zip(state.prey, state.alive, strict=True)]
        walls = [c in state.walls for c in range(config.num_wall_cells)]
        return torch.tensor(players + prey + walls, dtype=torch.uint8)

    for _, _, before, actions, rewards, acted, _, after in replay(config, games):
        boards, next_boards = planes_of(config, [before])[0], planes_of(config, [after])[0]
        for i in (i for i in range(n) if acted[i]):
            row = {
                "board": board(before, i),
                "joint": torch.tensor([actions[(i + k) % n] for k in range(n)], dtype=torch.uint8),
                "next_board": board(after, i),
                "payoff": torch.tensor(float(rewards[i])),
            }
            rows.append(row)
            planes.append({"board": boards[i], "next_board": next_boards[i]})
    return tree_map(lambda *x: torch.stack(x), *rows), tree_map(lambda *x: torch.stack(x), *planes)


@every_case
def test_transitions_are_those_of_the_plain_game(config):
    env = StagHuntEnv(config, 12, "cpu", 1)
    games, behind = record_games(env, lambda env: wm.play_games(small_args(config), env))
    plain, planes = plain_transitions(config, behind)
    ours = wm.transitions([games])
    for name, x in plain.items():
        assert x.dtype == ours[name].dtype
        assert torch.equal(ours[name][0], x), name
    for name, x in planes.items():
        assert torch.equal(wm.planes_of(config, ours[name])[0], x), name
    assert len(plain["board"]) == int(games["acted"].sum()) < games["acted"].numel(), "nobody who has left"
    assert torch.equal(wm.transitions([games], 37)["joint"][0], plain["joint"][:37])
    payoffs = torch.tensor(list(config.payoffs()))
    assert ((plain["payoff"][:, None] - payoffs).abs().amin(1) < 1e-6).all()
    assert len(plain["payoff"].unique()) > 1


def test_every_update_draws_from_all_data_of_its_own_seed():
    args = small_args(batch_size=128, num_updates=16, learning_rate=1e-30)
    data = wm.transitions([played(args, 30, seed) for seed in (1, 2)], 200)
    data["payoff"] = torch.arange(200.0) + torch.tensor([[0.0], [1000.0]])  # says which transition it is

    def drawn(first, last, seed=1):
        """[updates, 2, 128] numbers of the transitions"""
        world = Recorded(make_model(args, (1, 2)))
        optimizer = torch.optim.Adam(world.params.values())
        wm.train_updates(dataclasses.replace(args, seed=seed), world, optimizer, data, first, last)
        for _, (*fields, number) in world.seen:
            model, row = number.long() // 1000, number.long() % 1000
            for ours, name in zip(fields, ("board", "joint", "next_board"), strict=True):
                assert torch.equal(ours, data[name][model, row])
        return torch.stack([batch[3] for _, batch in world.seen])

    early = drawn(0, 8)
    assert (early[:, 0] < 1000).all() and (early[:, 1] >= 1000).all(), "each model has its own games"
    assert len({tuple(batch) for batch in early.flatten(0, 1).tolist()}) == 16
    assert len(early[:, 0].unique()) > 190
    assert (early != drawn(8, 16)).float().mean() > 0.9, "each log interval draws anew"
    assert (early != drawn(0, 8, seed=2)).float().mean() > 0.9


def test_right_labels_make_a_good_model():
    flags = {"wm_hidden": 32, "batch_size": 64, "num_updates": 60, "learning_rate": 2e-2}
    config = Config(height=3, width=4, num_players=3, num_hares=2)
    args = small_args(config, **flags, population="random")  # what it did before tells nothing
    data = wm.transitions([played(args, 200)], 5000)
    world = make_model(args)
    optimizer = torch.optim.Adam(world.params.values())
    assert wm.train_updates(args, world, optimizer, data, 0, args.num_updates).isfinite().all()
    held_out = dataset(args, 40, 2)
    metrics = wm.measure(args, held_out, wm.predict(args, world, held_out))
    # Actions in the order of the seats are right by chance in a third of the cases, and the most likely board with
    # them. The probabilities tell: obs_mse is 0.009 with these and 0.026 with labels shifted by one step.
    assert min(metrics["exact_match"], metrics["payoff_match"]) > 0.97
    assert metrics["obs_mse"] < 0.002


def test_figures_are_those_of_held_out_games(tmp_path, capsys, no_pictures):
    """In training of the first ten thousand transitions, at the end of all"""
    steps = {"num_updates": 2, "log_every": 2, "batch_size": 16}
    args = small_args(**steps, num_transitions=300, held_out_games=1500, run_dir=str(tmp_path))
    wm.main(args)
    (folder,) = tmp_path.iterdir()
    games, held_out = wm.collect(args, args.num_transitions, args.seed, "cpu")
    env_steps = sum(int(step.any()) for game in games["acted"] for step in game)
    assert f"{env_steps} env steps" in capsys.readouterr().out
    world = make_model(args)
    world.network.load_state_dict(wm.load_checkpoint(folder, wm.FORMAT)["networks"]["world"])
    held_out = wm.transitions([held_out])
    logged = lines_of(folder)[-1]
    final = dict(line.split(",") for line in (folder / "evaluation" / "final.csv").read_text().splitlines())
    assert logged["charts/env_steps"] == env_steps
    assert held_out["payoff"].shape[1] > 11_000
    for count, prefix, found in ((10_000, "wm/", logged), (None, "", final)):
        part = {name: x[:, :count] for name, x in held_out.items()}
        expected = wm.measure(args, part, wm.predict(args, world, part))
        for name in ("exact_match", "payoff_match", "obs_mse", "reward_mse"):
            assert float(found[prefix + name]) == pytest.approx(float(expected[name]), rel=1e-4)


# ---- The structured head


def plain_possible(config, old, new, payoff):
    """Is a prediction possible? Planes [C, H, W] before and after"""
    n, height, width = config.num_players, config.height, config.width
    old, new = old.flatten(1).tolist(), new.flatten(1).tolist()
    for k in range(n):
        before, after = ([c for c, x in enumerate(planes[k]) if x] for planes in (old, new))
        reach = {*before, *(to for c in before for to in reference.neighbours(height, width, c).values())}
        if len(after) > 1 or not set(after) <= reach or any(old[n][c] for c in after):
            return False
        if before and not after and not (old[n + 1][before[0]] or old[n + 2][before[0]]):
            return False
    prey_only_goes = all(b <= a for plane in (n + 1, n + 2) for a, b in zip(old[plane], new[plane], strict=True))
    return prey_only_goes and old[n] == new[n] and min(abs(payoff - p) for p in config.payoffs()) < 1e-4


@every_case
def test_whatever_the_weights_only_possible_boards(config):
    args, n = small_args(config), config.num_players
    changed = taken = 0
    for seed in (10, 20):
        data = dataset(args, 5, seed)
        world = make_model(args, (seed,), scale=10.0)
        board = data["board"]
        for step in range(3):  # on real boards, then on its own, with any actions at all
            joint = torch.randint(7, data["joint"].shape, generator=seeded(seed + step))
            predicted = wm.predict(args, world, data | {"board": board, "joint": joint})
            with torch.no_grad():
                next_board, payoff = world(board.float(), joint, method="predict")
            planes, next_planes = (wm.planes_of(config, x)[0] for x in (board, next_board))
            for b in range(0, len(planes), 13):
                assert plain_possible(config, planes[b], next_planes[b], float(payoff[0, b]))
            values = predicted["values"]
            assert values.min() >= 0
            assert values[:, :, :n].flatten(3).sum(3).max() <= 1 + 1e-5
            changed += int((next_planes[:, :n] != planes[:, :n]).sum())
            taken += int((next_planes[:, n + 1 :] < planes[:, n + 1 :]).sum())
            board = next_board
    assert changed > 0, "these weights should do something"
    assert taken > 0


@every_case
def test_values_behind_the_next_board_against_plain_loops(config):
    """Players: the chance to go to a cell. Prey: the chance that not even the likeliest of those on it takes it."""
    args, n = small_args(config), config.num_players
    data = {name: x[:, :30] for name, x in dataset(args, 4).items()}
    world = make_model(args, (2,), scale=0.2)
    with torch.no_grad():
        outcome, taken, _ = (x[0] for x in world(data["board"].float(), data["joint"]))
        ours = wm.cell_values(args, world, data["board"], data["joint"])[0]
    before = wm.planes_of(config, data["board"])[0].float().flatten(2)
    expected = before.clone()
    expected[:, :n] = 0.0
    for b, board in enumerate(data["board"][0].tolist()):
        for k, cell in enumerate(board[:n]):
            if cell == config.num_cells:
                continue
            near = reference.neighbours(config.height, config.width, cell)
            for way, share in enumerate(outcome[b, k].softmax(0)[:5].tolist()):
                to = cell if way == STAY else near.get(way)
                assert to is not None or share == 0
                if to is not None:
                    expected[b, k, to] += share
            on_it = [j for j in range(n) if board[j] == cell]
            left = 1 - float(taken[b, on_it].sigmoid().max())
            expected[b, n + 1 :, cell] = before[b, n + 1 :, cell] * left
    assert torch.allclose(ours.flatten(2), expected, atol=1e-5)


def test_a_payoff_depends_on_the_own_action_and_on_how_many_hunt_with_it():
    """Not on who only stands there, nor on who hunts elsewhere. Each number is another output of the network"""
    world = make_model(small_args(Config()))
    cases = len(world.params["payoff_head.bias"][0]) // len(Config().payoffs())
    world.params["payoff_head.weight"].data.zero_()
    world.params["payoff_head.bias"].data = torch.arange(cases).repeat_interleave(len(Config().payoffs()))[None].float()
    together, apart = [3, 3, 3, 3, 3, 0, 0, 0, 0, 0], [3, 2, 3, 3, 3, 2, 0, 0, 0, 0]  # four players, prey, no walls
    hunts = [
        (together, [HUNT_STAG, STAY, 0, HUNT_HARE], HUNT_STAG),
        (together, [HUNT_STAG, STAY, HUNT_STAG, HUNT_STAG], HUNT_STAG + 2),
        (together, [HUNT_STAG] * 4, HUNT_STAG + 3),
        (apart, [HUNT_STAG] * 4, HUNT_STAG + 2),
        (together, [HUNT_HARE] * 2 + [HUNT_STAG] * 2, HUNT_STAG + 4 + 1),
        (together, [1, HUNT_STAG, HUNT_STAG, 1], 1),
    ]
    board, joint, expected = zip(*hunts, strict=True)
    _, _, payoff = world(torch.tensor([board]).float(), torch.tensor([joint]))
    assert payoff[0, :, 0].tolist() == list(expected)


# ---- Measuring


def test_metrics_of_known_errors():
    config = Config(height=3, width=4, num_players=2, num_hares=1, final_time=3)
    args = small_args(config)
    new = torch.tensor([[4, 6, 6, 1, 0], [12, 11, 6, 12, 0], [12, 12, 12, 1, 0], [9, 9, 6, 1, 0]])
    new = new.byte().expand(2, -1, -1)  # two players, stag, hare; 12: gone
    data = {"next_board": new, "payoff": torch.tensor([[0.0, 1.0, 5.0, 0.0]]).expand(2, -1)}
    predicted = {"exact": torch.ones(2, 4, dtype=torch.bool), "payoff": data["payoff"].clone()}
    predicted["values"] = wm.planes_of(config, new).float()
    predicted["values"][1, 0, 3, 0, 0] = 0.5  # the stags' plane
    predicted["values"][1, 3, 1].view(-1)[9] = 0.0
    predicted["exact"][1, 3] = False
    predicted["payoff"][1] = torch.tensor([1.0, 1.0, 1.0, 0.2])
    metrics = wm.measure(args, data, predicted)
    cells = 4 * 12
    expected = {
        "exact_match": [1.0, 0.75],
        "payoff_match": [1.0, 0.25],
        "obs_mse": [0.0, 1.25 / cells / 5],
        "obs_psnr": [200.0, -10 * math.log10(1.25 / cells / 5)],
        "reward_mse": [0.0, (1 + 16 + 0.04) / 4],
        **{f"per_channel_mse/{c}": [0.0, v / cells] for c, v in enumerate([0, 1, 0, 0.25, 0])},
    }
    assert {name: x.tolist() for name, x in metrics.items()} == {k: pytest.approx(v) for k, v in expected.items()}


class Fake:
    """Model 0 knows every transition by heart, model 1 thinks that nothing ever changes."""

    def __init__(self, data):
        keys = zip(data["board"][0].tolist(), data["joint"][0].tolist(), strict=True)
        self.known = {(*b, *j): k for k, (b, j) in enumerate(keys)}
        self.data = data

    def __call__(self, board, joint, method):
        rows = zip(board[0].long().tolist(), joint[0].tolist(), strict=True)
        index = torch.tensor([self.known.get((*b, *j), 0) for b, j in rows])  # who has left need not be known
        new = torch.stack([self.data["next_board"][0, index], board[1].byte()])
        return new, torch.stack([self.data["payoff"][0, index], torch.zeros(len(index))])


def test_steps_ahead_against_plain_loops():
    args = small_args(Config(final_time=25))
    games = played(args, 20)
    shares = wm.steps_ahead(args, Fake(wm.transitions([games])), [games, games])
    assert shares.keys() == {f"{name}/{k}" for name in ("exact_match", "payoff_match") for k in (1, 3, 5, 10, 20)}
    for k in wm.STEPS_AHEAD:
        there = [(g, i) for g, t, i in games["acted"].nonzero().tolist() if t == k - 1]
        boards, payoff = games["next_board"], games["payoff"]
        unchanged = [all(torch.equal(boards[g, t, i], games["board"][g, 0, i]) for t in range(k)) for g, i in there]
        unpaid = [not payoff[g, :k, i].any() for g, i in there]
        assert shares[f"exact_match/{k}"].tolist() == pytest.approx([1.0, np.mean(unchanged)])
        assert shares[f"payoff_match/{k}"].tolist() == pytest.approx([1.0, np.mean(unpaid)])
    assert 0 < shares["payoff_match/5"][1] < 1


def test_a_pixel_head_reads_its_own_values_again():
    """Rounded, but as they are: a player may be in two cells"""
    args = small_args(WALLS, wm_head="pixel")
    games = played(args, 5)
    seen = Recorded(make_model(args, (2,), scale=0.3))
    wm.steps_ahead(args, seen, [games])
    planes = wm.planes_of(WALLS, games["board"][:, 0].flatten(0, 1))[None]
    for t, (_, (ours, joint)) in enumerate(seen.seen[:3]):
        assert torch.equal(ours, planes.float())
        assert torch.equal(joint[0], games["joint"][:, t].flatten(0, 1))
        planes = (seen.network(planes.float(), joint)[0] > 0.5).byte()
    assert planes[:, :, : WALLS.num_players].flatten(3).sum(3).max() > 1
    data = wm.transitions([games])
    predicted = wm.predict(args, seen.network, data)
    right = (predicted["values"] > 0.5).byte() == wm.planes_of(WALLS, data["next_board"])
    assert torch.equal(predicted["exact"], right.flatten(2).all(2))


def test_the_worst_predictions_are_kept_as_they_are():
    args = small_args(wm_head="pixel")
    data = dataset(args, 5)
    predicted = wm.predict(args, make_model(args, scale=0.1), data)
    cases = wm.worst_cases(args, data, predicted)
    error = (predicted["values"] - wm.planes_of(TWO, data["next_board"])).square().flatten(2).sum(2)[0]
    worst = error.argsort(descending=True)[:4]
    assert torch.equal(cases["predicted_values"][0], predicted["values"][0, worst])
    assert torch.equal(cases["board"][0], wm.planes_of(TWO, data["board"][0, worst]))
    assert torch.equal(cases["payoff"][0], data["payoff"][0, worst])
    assert not torch.equal(cases["predicted_values"], cases["predicted_values"].round())


def test_channel_weights():
    data = {name: x[:, :50] for name, x in dataset(small_args(), 10).items()}
    inputs = [data["board"].float(), data["joint"], data["next_board"], data["payoff"]]
    losses = []
    for weights in (None, (1, 1, 1, 1, 1), (0, 0, 0, 0, 0), (3, 0, 0, 2, 0)):
        world = make_model(small_args(wm_head="pixel", wm_channel_weights=weights))
        losses.append(world(*inputs, method="loss").mean().item())
    board, next_board = (wm.planes_of(TWO, data[name]).float() for name in ("board", "next_board"))
    planes, paid = world(board, data["joint"])
    channel = (planes - next_board).square().mean((0, 1, 3, 4)).detach()
    payoff = (paid - data["payoff"]).square().mean().item()
    expected = [float(channel.sum()) + payoff] * 2 + [payoff, float(3 * channel[0] + 2 * channel[3]) + payoff]
    assert losses == pytest.approx(expected, rel=1e-4)
