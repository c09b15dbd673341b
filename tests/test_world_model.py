"""World model: labels, what the structured head cannot predict, and how predictions are measured."""

import math

import pytest
import reference_game as reference
import torch
from helpers import PRETRAINING_CASES, planes_of, replay, seeded
from torch import nn

import pretrain_world_model as wm
from stag_hunt_env import HUNT_HARE, HUNT_STAG, STAY, StagHuntEnv, State
from stag_hunt_env import StagHuntConfig as Config

PLAYERS = ("random", "nearest_stag", "nearest_hare")
every_case = pytest.mark.parametrize("config", PRETRAINING_CASES.values(), ids=PRETRAINING_CASES)


def played(config, num_games, seed=1, players=PLAYERS):
    env = StagHuntEnv(config, 1, "cpu", seed)
    return env, wm.play_games(env, players, num_games)


def plain_transitions(config, games):
    """The same transitions from plain loops over the plain-Python game"""
    rows, n = [], config.num_players
    for _, t, before, actions, rewards, acted, done, after in replay(config, games):
        boards, next_boards = planes_of(config, [before])[0], planes_of(config, [after])[0]
        for i in (i for i in range(n) if acted[i]):
            joint = torch.tensor([actions[(i + k) % n] for k in range(n)], dtype=torch.uint8)
            clock, ended = torch.tensor(t, dtype=torch.int32), torch.tensor(done)
            rows.append((boards[i], joint, next_boards[i], torch.tensor(float(rewards[i])), clock, ended))
    return wm.Transitions(*(torch.stack(field) for field in zip(*rows, strict=True)))


def differing(ours, plain):
    """names of the fields that differ"""
    return [name for name, a, b in zip(plain._fields, ours, plain, strict=True) if a.dtype != b.dtype or not torch.equal(a, b)]


# ---------------------------------------------------------------------------------------------------------------------
# Labels


@every_case
def test_transitions_are_those_of_the_plain_game(config):
    env, games = played(config, 12)
    plain = plain_transitions(config, games)
    assert differing(wm.transitions(env, games), plain) == []
    assert len(plain.board) == int(games.acted.sum()) < games.acted.numel()
    assert differing(wm.transitions(env, games, 37), wm.Transitions(*(x[:37] for x in plain))) == []
    boards, joint = wm.views(env, games)
    cells = games.states.position[:, :-1, :, None] == torch.arange(config.num_cells)
    assert torch.equal(boards[:, :-1, :, 0].flatten(3).bool()[games.acted], cells[games.acted]), "plane 0 is oneself"
    assert torch.equal(joint[..., 0], games.actions), "joint[0] is one's own action"


@every_case
def test_wrong_labels_would_be_noticed(config):
    env, games = played(config, 12)
    plain = plain_transitions(config, games)
    shifted = games._replace(actions=games.actions.roll(1, 1))
    assert "joint" in differing(wm.transitions(env, shifted), plain)
    assert "reward" in differing(wm.transitions(env, games._replace(reward=games.reward.roll(1, 1))), plain)
    everyone = wm.transitions(env, games._replace(acted=torch.ones_like(games.acted)))
    assert len(everyone.board) > len(plain.board)
    global_order = games.actions[:, :, None].expand(-1, -1, config.num_players, -1)[games.acted]
    assert not torch.equal(global_order, plain.joint)


def test_views_turn_the_seats_for_every_observer():
    config = Config(height=2, width=5, num_players=3, num_hares=0)
    env, games = played(config, 5)
    boards, joint = wm.views(env, games)
    for i in range(3):
        for k in range(3):
            seat = (i + k) % 3
            assert torch.equal(joint[:, :, i, k], games.actions[:, :, seat])
            assert torch.equal(boards[:, :, i, k], boards[:, :, seat, 0])
    assert not torch.equal(joint[:, :, 1], joint[:, :, 0])


def small_args(**changes):
    return wm.Args(**{"wm_hidden": 48, "batch_size": 128, "num_updates": 150, "device": "cpu", **changes})


def trained_metrics(config, data, held_out):
    args = small_args(num_updates=100, learning_rate=1e-2)
    model = wm.make_world_model(args, config, 1, [1], "cpu")
    optimiser = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    loss = wm.train(args, model, optimiser, wm.Transitions(*(x[None] for x in data)), [seeded(1)], 0, args.num_updates)
    assert math.isfinite(float(loss))
    held_out = wm.Transitions(*(x[None] for x in held_out))
    return wm.one_step_metrics(config, held_out, wm.predict(model, held_out.board, held_out.joint))[0]


def test_only_right_labels_make_a_good_model():
    config = Config(height=3, width=4, num_players=3, num_hares=2)
    only_random = ("random",)  # what it did before tells nothing
    env, games = played(config, 200, players=only_random)
    data, held_out = wm.transitions(env, games, 5000), wm.transitions(env, played(config, 40, 2, only_random)[1])
    right = trained_metrics(config, data, held_out)
    assert right["exact_match"] > 0.95
    shifted = wm.transitions(env, games._replace(actions=games.actions.roll(1, 1)), 5000)
    global_order = games.actions[:, :, None].expand(-1, -1, 3, -1)[games.acted][:5000]
    assert len(global_order) == len(shifted.joint) == 5000
    for wrong in (shifted.joint, global_order):
        # In global order a third of the labels is right by chance, and the most likely board with it: the raw values tell.
        assert trained_metrics(config, data._replace(joint=wrong), held_out)["obs_mse"] > 10 * right["obs_mse"]


# ---------------------------------------------------------------------------------------------------------------------
# The structured head


def random_model(config, seed, models=2, scale=10.0):
    model = wm.WorldModel(config, [seeded(seed + k) for k in range(models)], 16)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=seeded(seed)))
    return model


def plain_possible(config, old, new, reward):
    """`possible` once more, one board [C, H, W] at a time"""
    n, height, width = config.num_players, config.height, config.width
    old, new = old.flatten(1).tolist(), new.flatten(1).tolist()
    for k in range(n):
        before, after = ([c for c, x in enumerate(planes[k]) if x] for planes in (old, new))
        reach = {*before, *(to for c in before for to in reference.neighbours(height, width, c).values())}
        if len(after) > 1 or not set(after) <= reach or any(old[n][c] for c in after) or any(x not in (0, 1) for x in new[k]):
            return False
        if before and not after and not (old[n + 1][before[0]] or old[n + 2][before[0]]):
            return False
    prey_only_goes = all(b <= a for plane in (n + 1, n + 2) for a, b in zip(old[plane], new[plane], strict=True))
    return prey_only_goes and old[n] == new[n] and min(abs(reward - p) for p in config.payoffs()) < 1e-4


@every_case
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_whatever_the_weights_only_possible_boards(config, seed):
    env, games = played(config, 10, seed=seed)
    data = wm.transitions(env, games)
    model, n = random_model(config, seed), config.num_players
    board = data.board.expand(2, *data.board.shape)
    changed = taken = 0
    for step in range(4):  # on real boards, then on its own, with any actions at all
        joint = torch.randint(7, (2, *data.joint.shape), generator=seeded(seed + step))
        p = model.predict(board, joint)
        assert wm.possible(config, board, p.board, p.reward).all()
        players, before = p.board[:, :, :n].flatten(3), board[:, :, :n].flatten(3)
        assert set(p.board.unique().tolist()) <= {0, 1} and players.sum(3).max() <= 1
        assert (players.sum(3) <= before.sum(3)).all(), "who is absent stays absent"
        assert torch.isin(p.reward, torch.tensor(list(config.payoffs()))).all()
        assert p.raw.min() >= 0 and p.raw.max() <= 1 + 1e-5 and p.raw[:, :, :n].flatten(3).sum(3).max() <= 1 + 1e-5
        for b in range(0, board.shape[1], 40):
            assert plain_possible(config, board[0, b], p.board[0, b], float(p.reward[0, b]))
        changed += int((p.board[:, :, :n] != board[:, :, :n]).sum())
        taken += int((p.board[:, :, n + 1 :] < board[:, :, n + 1 :]).sum())
        board = p.board
    assert changed > 0 and (taken > 0 or seed), "these weights should do something"


@every_case
def test_possible_is_true_of_every_real_transition(config):
    env, games = played(config, 30)
    data = wm.transitions(env, games)
    assert wm.possible(config, data.board, data.next_board, data.reward).all()


def board_of(config, players, prey=(), walls=()):
    """players: cells or None; prey: (is it a stag, cell)"""
    board = torch.zeros(config.observation_shape[0], config.num_cells, dtype=torch.uint8)
    for k, cell in enumerate(players):
        if cell is not None:
            board[k, cell] = 1
    board[config.num_players, list(walls)] = 1
    for is_stag, cell in prey:
        board[config.num_players + (1 if is_stag else 2), cell] = 1
    return board.view(config.observation_shape)


IMPOSSIBLE = {  # cells of a 3x4 board: players at 0 and 6, stag on 6, hare on 1, wall on 4
    "jump": ([2, 6], {}, 0.0),
    "diagonal": ([5, 6], {}, 0.0),
    "round the edge": ([3, 6], {}, 0.0),
    "split": ([0, 6], {"also": (0, 1)}, 0.0),
    "into a wall": ([4, 6], {}, 0.0),
    "leaves where no prey stands": ([None, 6], {}, 0.0),
    "returns": ([0, 6, 7], {}, 0.0),
    "prey appears": ([0, 6], {"prey": [(True, 6), (False, 1), (False, 9)]}, 0.0),
    "hare becomes a stag": ([0, 6], {"prey": [(True, 6), (True, 1)]}, 0.0),
    "wall vanishes": ([0, 6], {"walls": []}, 0.0),
    "no such reward": ([0, 6], {}, 0.042),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_possible_refuses(name):
    config = Config(height=3, width=4, num_players=3, num_hares=1, max_wall_pieces=1)
    prey = [(True, 6), (False, 1)]
    old = board_of(config, [0, 6, None], prey, [4])
    players, change, reward = IMPOSSIBLE[name]
    new = board_of(config, players, change.get("prey", prey), change.get("walls", [4]))
    if "also" in change:
        new[change["also"][0]].view(-1)[change["also"][1]] = 1
    for allowed, good_reward in ((old, 0.0), (board_of(config, [1, 2, None], prey[:1], [4]), 1.0)):
        assert bool(wm.possible(config, old, allowed, torch.tensor(good_reward)))
        assert plain_possible(config, old, allowed, good_reward)
    assert not bool(wm.possible(config, old, new, torch.tensor(reward)))
    assert not plain_possible(config, old, new, reward)


def test_blocked_moves_have_no_probability():
    config = PRETRAINING_CASES["walls"]
    env, games = played(config, 10)
    data = wm.transitions(env, games)
    outcome = random_model(config, 5, models=1, scale=0.2)(data.board[None], data.joint[None])[0].softmax(3)
    legal = env.legal_actions(State(*(x[:, :-1].flatten(0, 1) for x in games.states)))
    own = legal[games.acted.flatten(0, 1)]
    assert (outcome[0, :, 0, :4][~own[:, :4]] == 0).all() and (outcome[0, :, 0, :4][own[:, :4]] > 0).any()


def test_the_same_weights_work_on_another_board():
    small, large = Config(), Config(height=6, width=9, num_hares=7)
    model, other = random_model(small, 3), random_model(large, 4)
    other.load_state_dict(model.state_dict())
    env, games = played(large, 10)
    data = wm.transitions(env, games)
    p = other.predict(data.board.expand(2, *data.board.shape), data.joint.expand(2, *data.joint.shape))
    assert p.board.shape == (2, *data.board.shape) and wm.possible(large, data.board, p.board, p.reward).all()


def test_rules_are_the_same_in_every_place():
    """One player on a stag, moved over the board: its logits may depend on the edge only."""
    config = Config(height=5, width=6, num_players=2, num_hares=0)
    model = random_model(config, 1, models=1, scale=0.2)
    boards = torch.stack([board_of(config, [c, c], [(True, c)]) for c in (7, 8, 9, 14, 20)])[None]
    joint = torch.tensor([HUNT_STAG, STAY]).expand(1, 5, 2)
    for logits in model(boards, joint):
        assert torch.allclose(logits, logits[:, :1].expand_as(logits), atol=1e-4)


@every_case
def test_a_player_is_judged_alike_by_every_observer(config):
    """Observer i's logits about its k-th player are those of that player about itself."""
    env, games = played(config, 4)
    boards, joint = (x.flatten(0, 1) for x in (v[:, : config.final_time] for v in wm.views(env, games)))
    model, n = random_model(config, 2, models=1, scale=0.2), config.num_players
    with torch.no_grad():
        outcome, taken, _ = model(boards.flatten(0, 1)[None], joint.flatten(0, 1)[None])
    present = boards[:, :, :n].flatten(3).amax(3) > 0
    for logits in (outcome[0].unflatten(0, (-1, n)), taken[0].unflatten(0, (-1, n))):
        own = env.seats_to_ego(logits[:, :, 0])
        assert torch.allclose(logits[present], own[present], rtol=1e-3, atol=1e-3)
        assert not torch.allclose(logits[present], own.roll(1, 2)[present], rtol=1e-3, atol=1e-3)


def test_two_hunters_differ_from_one():
    config = Config(num_players=3)
    model = random_model(config, 2, models=1, scale=0.2)
    together = board_of(config, [5, 5, 5], [(True, 5)])
    alone_with_one = board_of(config, [5, 5, None], [(True, 5)])
    far = board_of(config, [5, 5, 15], [(True, 5)])
    cases = [
        (together, [HUNT_STAG, HUNT_STAG, HUNT_STAG]),  # 10/3 each
        (alone_with_one, [HUNT_STAG, HUNT_STAG, STAY]),  # 5 each: the mean over the others is the same as above
        (far, [HUNT_STAG, HUNT_STAG, HUNT_STAG]),
        (together, [HUNT_STAG, HUNT_STAG, STAY]),
        (together, [HUNT_STAG, STAY, STAY]),
    ]
    boards, joints = torch.stack([b for b, _ in cases])[None], torch.tensor([[j for _, j in cases]])
    payoff = model(boards, joints)[2][0]
    distance = torch.cdist(payoff, payoff)
    same = {(1, 2), (2, 1)}  # a third player out of reach changes nothing
    for a in range(len(cases)):
        for b in range(len(cases)):
            if a != b:
                assert bool(distance[a, b] < 1e-3) == ((a, b) in same), (a, b)
    swapped = model(boards, joints[:, :, [0, 2, 1]])[2][0]
    assert torch.allclose(swapped[3], payoff[3], atol=1e-4), "who of two equal players hunts does not matter"


@pytest.mark.parametrize("strengths", [None, (1.0, 2.0, 3.0)])
def test_each_player_sees_who_does_what_around_it(strengths):
    config = Config(num_players=3, strengths=strengths)
    model, seen = random_model(config, 2, models=1), []
    model.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    generator = seeded(5)
    boards = [[5, 0, 15], [5, None, 6], [5, 5, 0], [None, 5, 6], *torch.randint(16, (40, 3), generator=generator).tolist()]
    joint = torch.randint(7, (len(boards), 3), generator=generator)
    model(torch.stack([board_of(config, cells, [(True, 5)]) for cells in boards])[None], joint[None])
    for cells, actions, found in zip(boards, joint.tolist(), seen[0], strict=True):
        for own in range(3):
            painted = torch.zeros(3, 3, 3, 7)  # [player in own's order, row, column, action]
            for k, other in enumerate((own + shift) % 3 for shift in range(3)):
                if cells[own] is None or cells[other] is None:
                    continue
                down, right = (a - b for a, b in zip(divmod(cells[other], 4), divmod(cells[own], 4), strict=True))
                if abs(down) <= 1 and abs(right) <= 1:
                    painted[k, down + 1, right + 1, actions[other]] = 1
            parts = [painted[0], painted[1:].sum(0)]
            assert torch.equal(found[own, model.padding :][:126], torch.cat([part.flatten() for part in parts]))
            assert strengths is None or torch.equal(found[own, -126:], painted[1:].flatten())


def test_loss_of_right_and_wrong_logits():
    """The loss, fed with logits instead of a network, is 0 for the truth and not for a player who goes elsewhere."""
    config = PRETRAINING_CASES["walls"]
    env, games = played(config, 10)
    data = wm.Transitions(*(x[None] for x in wm.transitions(env, games)))
    model = random_model(config, 1, models=1)
    planes, cell, present = model.read(data.board)
    next_planes, next_cell, next_present = model.read(data.next_board)
    n = config.num_players
    goes = torch.where(next_present, model.outcome[cell, next_cell], 5)
    gone = planes[:, :, n + 1 :].amax(2).gather(2, cell) > next_planes[:, :, n + 1 :].amax(2).gather(2, cell)
    paid = (data.reward[..., None] - model.payoffs).abs().argmin(2)
    logits = [50 * nn.functional.one_hot(goes, 6).float(), 100 * gone.float() - 50, 50 * nn.functional.one_hot(paid).float()]
    model.forward = lambda board, joint: logits
    assert float(model.loss(*data[:4], torch.ones_like(data.reward))) < 1e-6
    logits[0] = logits[0].masked_fill(~present[..., None], 7.0)
    assert float(model.loss(*data[:4], torch.ones_like(data.reward))) < 1e-6, "where absent players go is nobody's loss"
    logits[0] = logits[0].roll(1, 3)
    assert float(model.loss(*data[:4], torch.ones_like(data.reward))) > 1


@every_case
def test_every_reward_is_a_payoff(config):
    _, games = played(config, 150)
    rewards = games.reward[games.acted]
    payoffs = torch.tensor(list(config.payoffs()))
    assert ((rewards[:, None] - payoffs).abs().amin(1) < 1e-6).all()
    assert len(rewards.unique()) > 1


def test_default_payoffs():
    names = {0.0: "none"} | {1 / k: "hare" for k in (1, 2, 3, 4)} | {10 / k: "stag" for k in (2, 3, 4)}
    found = Config().payoffs()
    assert {round(value, 5): name for value, name in found.items()} == {round(v, 5): name for v, name in names.items()}
    assert wm.events_of(Config(), torch.tensor([0.0, 1.0, 1 / 3, 2.5, 5.0, 0.1])).tolist() == [0, 1, 1, 2, 2, 0]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def perfect(data):
    return wm.Prediction(data.next_board, data.next_board.float(), data.reward)


def test_metrics_of_a_perfect_prediction():
    env, games = played(Config(final_time=20), 40)
    data = wm.Transitions(*(x[None] for x in wm.transitions(env, games)))
    row = wm.one_step_metrics(env.config, data, perfect(data))[0]
    ones = [
        "exact_match",
        "end_accuracy",
        "possible_boards",
        *(f"reward_{m}/{e}" for m in ("precision", "recall") for e in wm.EVENTS),
    ]
    assert {key: row[key] for key in ones} == dict.fromkeys(ones, 1.0)
    zeros = ["obs_mse", "reward_mse", *(f"per_channel_mse/{c}" for c in range(7))]
    assert {key: row[key] for key in zeros} == dict.fromkeys(zeros, 0.0)


def test_metrics_of_known_errors():
    config = Config(height=3, width=4, num_players=2, num_hares=1, final_time=3)
    prey = [(True, 6), (False, 1)]
    old = torch.stack([board_of(config, cells, prey) for cells in ([0, 6], [1, 11], [6, 6], [8, 9])])
    later = ([4, 6], prey), ([None, 11], prey[:1]), ([None, None], prey[1:]), ([9, 9], prey)
    new = torch.stack([board_of(config, *content) for content in later])
    joint = torch.tensor([[1, STAY], [HUNT_HARE, STAY], [HUNT_STAG, HUNT_STAG], [3, STAY]], dtype=torch.uint8)
    reward, clock = torch.tensor([0.0, 1.0, 5.0, 0.0]), torch.tensor([0, 0, 1, 2], dtype=torch.int32)
    one = wm.Transitions(old, joint, new, reward, clock, torch.tensor([False, False, True, True]))
    data = wm.Transitions(*(torch.stack([x, x]) for x in one))
    p = wm.Prediction(*(x.clone() for x in perfect(data)))
    p.raw[1, 0, 3, 0, 0] = 0.5  # the stags' plane; does not show in the board
    p.board[1, 0, :2] = 0  # everybody is gone, one without prey: the end, but not a possible one
    p.raw[1, 0, 1].view(-1)[6] = 0.0
    p.board[1, 3, 0].view(-1)[[9, 0]] = torch.tensor([0, 1], dtype=torch.uint8)  # a jump from 8 to 0
    p.reward[1] = torch.tensor([1.0, 1.0, 1.0, 0.2])
    clean, row = wm.one_step_metrics(config, data, p)
    assert clean["exact_match"] == clean["possible_boards"] == 1.0 and clean["obs_mse"] == 0.0
    cells = 4 * 12
    expected = {
        "exact_match": 0.5,
        "obs_mse": (0.25 + 1) / cells / 5,
        "obs_psnr": -10 * math.log10(1.25 / cells / 5),
        "reward_mse": (1 + 16 + 0.04) / 4,
        "end_accuracy": 0.75,
        "possible_boards": 0.5,  # and the jump; its reward of 0.2 is none of the game's either
        **{f"per_channel_mse/{c}": v / cells for c, v in enumerate([0, 1, 0, 0.25, 0])},
        "reward_precision/none": 1.0,  # 0.2 is nearest to 0
        "reward_recall/none": 0.5,
        "reward_precision/hare": 1 / 3,
        "reward_recall/hare": 1.0,
        "reward_recall/stag": 0.0,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert math.isnan(row["reward_precision/stag"]), "never predicted"


class Fake(nn.Module):
    """Model 0 knows every transition by heart, model 1 thinks that nothing ever changes."""

    def __init__(self, data):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 1))
        keys = zip(data.board.flatten(1).tolist(), data.joint.tolist(), strict=True)
        self.known = {(*b, *j): k for k, (b, j) in enumerate(keys)}
        self.data = data

    def predict(self, board, joint):
        rows = zip(board[0].flatten(1).tolist(), joint[0].tolist(), strict=True)
        index = torch.tensor([self.known[*b, *j] for b, j in rows])
        new = torch.stack([self.data.next_board[index], board[1]])
        return wm.Prediction(new, new.float(), torch.stack([self.data.reward[index], torch.zeros(len(index))]))


def test_steps_ahead_against_plain_loops():
    env, games = played(Config(final_time=25), 20, players=("random",))
    fake = Fake(wm.transitions(env, games))
    boards, _ = wm.views(env, games)
    shares = wm.steps_ahead(env, fake, [games], limit=10**6)
    for k in wm.STEPS_AHEAD:
        starts = [(g, t, i) for g, t, i in games.acted.nonzero().tolist() if t + k <= 25 and games.acted[g, t + k - 1, i]]
        unchanged = [torch.equal(boards[g, t, i], boards[g, t + k, i]) for g, t, i in starts]
        assert shares[k].tolist() == pytest.approx([1.0, sum(unchanged) / len(starts)], abs=1e-6)


def test_measure_averages_members_and_counts_disagreement():
    env, games = played(Config(final_time=25), 20)
    data = wm.transitions(env, games)
    held_out = wm.Transitions(*(x[None] for x in data))
    (row,) = wm.measure(Fake(data), env, [games], held_out, ahead=True)
    still = (data.board == data.next_board).flatten(1).all(1).float().mean()
    assert row["exact_match"] == pytest.approx(float(1 + still) / 2, abs=1e-6)
    assert row["exact_match"] > row["exact_match/20"] > 0.49
    assert row["disagreement"] == pytest.approx(1 - float(still), abs=1e-6) and row["exact_match_when_agreed"] == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Stacked models


@pytest.mark.parametrize("head", ["structured", "pixel"])
def test_stacked_models_are_independent(head):
    config = PRETRAINING_CASES["two players"]
    env, games = played(config, 10)
    data = wm.transitions(env, games, 50)
    args = small_args(wm_head=head, wm_hidden=16)
    model, alone = (wm.make_world_model(args, config, len(seeds), seeds, "cpu") for seeds in ([7, 8], [8]))
    batch = [x.expand(2, *x.shape) for x in (*data[:4], torch.ones(len(data.reward)))]
    loss = model.loss(*batch)
    loss[0].backward()
    for p in model.parameters():
        assert (p.grad[1] == 0).all() and (p.grad[0].abs().sum() > 0 or p.grad.numel() < 20)
    assert loss[0] != loss[1]
    assert loss[1].item() == pytest.approx(alone.loss(*(x[:1] for x in batch)).item(), rel=1e-5)


@pytest.mark.parametrize("head", ["structured", "pixel"])
def test_boards_of_weight_0_are_not_learned_from(head):
    config = PRETRAINING_CASES["two players"]
    env, games = played(config, 10)
    data = [x[None] for x in wm.transitions(env, games, 50)[:4]]
    model = wm.make_world_model(small_args(wm_head=head, wm_hidden=16), config, 1, [1], "cpu")
    weight = (torch.arange(50) < 20).float()[None]
    part = model.loss(*(x[:, :20] for x in data), torch.ones(1, 20))
    assert model.loss(*data, weight).item() == pytest.approx(part.item(), rel=1e-5)
    assert model.loss(*data, 0 * weight).item() == 0.0


def test_a_seed_learns_the_same_alone_and_in_company():
    config = PRETRAINING_CASES["two players"]
    env, games = played(config, 20)
    data = wm.transitions(env, games, 100)
    weights = []
    for seeds in ([8], [7, 8, 9]):
        model = wm.make_world_model(small_args(wm_hidden=16), config, len(seeds), seeds, "cpu")
        optimiser = torch.optim.Adam(model.parameters())
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        batch = wm.Transitions(*(x.expand(len(seeds), *x.shape) for x in data))
        wm.train(small_args(batch_size=16, num_updates=5), model, optimiser, batch, generators, 0, 5)
        weights.append(torch.cat([p[seeds.index(8)].flatten() for p in model.parameters()]).detach())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_channel_weights():
    config = PRETRAINING_CASES["two players"]
    env, games = played(config, 10)
    data = [x[None] for x in wm.transitions(env, games, 50)[:4]]
    losses = []
    for weights in (None, (1, 1, 1, 1, 1), (0, 0, 0, 0, 0), (3, 0, 0, 2, 0)):
        model = wm.make_world_model(small_args(wm_head="pixel", wm_channel_weights=weights), config, 1, [1], "cpu")
        losses.append(model.loss(*data, torch.ones_like(data[3])).item())
    raw, paid = model(*data[:2])
    channel = (raw - data[2].float()).square().mean((0, 1, 3, 4)).detach()
    reward = (paid - data[3]).square().mean().item()
    expected = [float(channel.sum()) + reward] * 2 + [reward, float(3 * channel[0] + 2 * channel[3]) + reward]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_each_model_is_clipped_by_its_own_norm():
    parameters = [nn.Parameter(torch.zeros(3, 2, 2)), nn.Parameter(torch.zeros(3, 1, 4))]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=seeded(p.shape[1]))
        p.grad[0] *= 100
        p.grad[2] *= 1e-3
    before = [p.grad.clone() for p in parameters]
    norms = wm.clip_per_model(parameters, 0.5)
    for m in range(3):
        norm = math.sqrt(sum(float(g[m].square().sum()) for g in before))
        assert float(norms[m]) == pytest.approx(norm, rel=1e-5)
        for p, g in zip(parameters, before, strict=True):
            assert torch.allclose(p.grad[m], g[m] * min(1.0, 0.5 / norm), rtol=1e-4)
