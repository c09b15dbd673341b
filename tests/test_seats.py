"""Who sits where: the map between seats and learners, redraws between games, and the exact posterior."""

import itertools
from typing import NamedTuple

from stag_hunt_env import (
    ALL_SEATS,
    LEARNER,
    PLAYER_PROBS,
    POPULATION,
    STRANGER_PROBS,
    Seats,
    StagHuntConfig,
    StagHuntEnv,
    State,
    copy_state,
    redraw_prob,
    sample,
)

import pytest
import reference_game as reference
import torch
from helpers import chi_square_p, games_of, seat_probs

CONFIG = StagHuntConfig(height=3, width=5, num_players=3, num_stags=2, num_hares=2, final_time=6)
TWO_TABLES = [["learner", "mixed", "learner"], ["nearest_hare", "learner", "switching"]]


def make(tables, games=3, config=CONFIG, seed=1, **options):
    torch.manual_seed(seed)
    env = StagHuntEnv(config, games * len(tables), seed=seed)
    return env, Seats(env, tables, **options)


class Step(NamedTuple):
    state: State  # before the step, and so are:
    kinds: torch.Tensor
    posterior: torch.Tensor
    expected: torch.Tensor  # posterior_probs
    probs: torch.Tensor
    actions: torch.Tensor
    present: torch.Tensor
    done: torch.Tensor
    next_kinds: torch.Tensor
    next_posterior: torch.Tensor


def play(env, seats, steps):
    for _ in range(steps):
        state = copy_state(env.state)
        kinds, posterior = seats.kinds.clone(), seats.posterior()
        learner_probs = None
        if seats.num_learners and not seats.watch:
            learner_probs = seats.to_learners(PLAYER_PROBS["random"](env, state, ALL_SEATS))
        probs = seats.action_probs(state, learner_probs)
        expected, actions = seats.posterior_probs(posterior), sample(probs)
        _, _, present, done = env.step(actions)
        seats.update(actions, present, done)
        yield Step(
            state, kinds, posterior, expected, probs, actions, present, done, seats.kinds.clone(), seats.posterior()
        )


# ---------------------------------------------------------------------------------------------------------------------
# The map between seats and learners


def numbered(games, n=3):
    """[B, N] whose entry says game and seat: 10 * game + seat"""
    return 10 * torch.arange(games)[:, None] + torch.arange(n)


def test_learners_are_numbered_block_by_block_and_seat_by_seat():
    _, seats = make(TWO_TABLES)
    assert (seats.num_blocks, seats.num_envs, seats.num_learners) == (2, 3, 3)
    x = numbered(6)
    assert seats.to_learners(x).tolist() == [[0, 10, 20], [2, 12, 22], [31, 41, 51]]
    assert seats.learner_seat.tolist() == [[0] * 3, [2] * 3, [1] * 3]
    assert seats.per_learner(x[:, 0]).tolist() == [[0, 10, 20], [0, 10, 20], [30, 40, 50]]
    back = seats.to_seats(seats.to_learners(x), torch.full_like(x, -1))
    learns = torch.tensor([[True, False, True]] * 3 + [[False, True, False]] * 3)
    assert torch.equal(back, torch.where(learns, x, -1))
    deep = torch.rand(6, 3, 4, 2)
    assert torch.equal(seats.to_learners(deep)[2, 1], deep[4, 1])
    assert torch.equal(
        seats.to_seats(seats.to_learners(deep), deep + 1), torch.where(learns[..., None, None], deep, deep + 1)
    )
    assert seats.has_rule_based


def test_everybody_learns():
    _, seats = make([["learner"] * 3] * 2)
    x = numbered(6)
    assert seats.to_learners(x).tolist() == [[10 * g + s for g in range(b, b + 3)] for b in (0, 3) for s in range(3)]
    assert torch.equal(seats.to_seats(seats.to_learners(x)), x)
    assert seats.num_learners == 6 and not seats.has_rule_based
    assert seats.per_learner(x[:, 1]).tolist() == [[1, 11, 21]] * 3 + [[31, 41, 51]] * 3


def test_shared_parameters_make_one_learner_of_a_block():
    _, seats = make([["learner", "mixed", "learner"], ["learner", "learner", "random"]], share_parameters=True)
    x = numbered(6)
    rows = [[0, 10, 20, 2, 12, 22], [30, 40, 50, 31, 41, 51]]  # seat by seat
    assert seats.num_learners == 2 and seats.to_learners(x).tolist() == rows
    assert seats.learner_seat.tolist() == [[0, 0, 0, 2, 2, 2], [0, 0, 0, 1, 1, 1]]
    assert seats.per_learner(x[:, 0]).tolist() == [[0, 10, 20] * 2, [30, 40, 50] * 2]
    back = seats.to_seats(seats.to_learners(x), torch.full_like(x, -1))
    assert back.tolist() == [[10 * g, -1, 10 * g + 2] for g in range(3)] + [
        [10 * g, 10 * g + 1, -1] for g in range(3, 6)
    ]
    _, everybody = make([["learner"] * 3] * 2, share_parameters=True)
    assert torch.equal(everybody.to_seats(everybody.to_learners(x)), x) and everybody.learner_seat.shape == (2, 9)


# ---------------------------------------------------------------------------------------------------------------------
# Who plays


def test_everybody_plays_by_the_rule_of_who_sits_there():
    tables = [["learner", "mixed", "waiting"], ["last_stag", "learner", "switching"]]
    env, seats = make(tables, population=("nearest_hare", "first_stag"))
    rules, seen = PLAYER_PROBS | STRANGER_PROBS, set()
    assert seats.names[:2] == ["nearest_hare", "first_stag"]
    for step in play(env, seats, 40):
        for b in range(6):
            for i in range(3):
                kind = int(step.kinds[b, i])
                name = "random" if kind == LEARNER else seats.names[kind]  # learners play at random here
                assert torch.equal(step.probs[b, i], rules[name](env, step.state, i)[b]), name
                seen.add((tables[b // 3][i], name))
    mixed = {("mixed", "nearest_hare"), ("mixed", "first_stag")}
    assert seen == mixed | {("learner", "random"), ("waiting", "waiting"), ("last_stag", "last_stag")} | {
        ("switching", "nearest_stag"),
        ("switching", "nearest_hare"),
    }


def test_watching():
    """Drawn players sit in all seats, and the learners' map stays that of the table."""
    env, seats = make([["learner", "waiting", "learner"]], games=500, watch=True)
    assert seats.has_rule_based and seats.num_learners == 2 and seats.learner_seat[:, 0].tolist() == [0, 2]
    assert seats.names == list(POPULATION)
    for seat in range(3):
        assert chi_square_p(torch.bincount(seats.kinds[:, seat], minlength=3)) > 1e-3
    for step in play(env, seats, 8):
        assert torch.equal(step.probs, seat_probs(env, step.state, step.kinds))
    with pytest.raises(ValueError, match="watch"):
        seats.action_probs(env.state, torch.rand(2, 500, 7))
    everybody_env, everybody = make([["learner"] * 3], games=4, watch=True)
    assert everybody.has_rule_based and everybody.action_probs(everybody_env.state).shape == (4, 3, 7)
    x = torch.rand(4, 3)
    assert torch.equal(everybody.to_seats(everybody.to_learners(x)), x)


# ---------------------------------------------------------------------------------------------------------------------
# Redraws


@pytest.mark.parametrize("redraw, prob", [("game", 1.0), ("never", 0.0), ("0.25", 0.25)])
def test_a_mixed_seat_is_drawn_anew_only_between_games(redraw, prob):
    tables = [["learner", "mixed", "mixed"], ["random", "learner", "mixed"]]
    env, seats = make(tables, games=100, redraw=redraw)
    mixed = torch.tensor([[name == "mixed" for name in table] for table in tables]).repeat_interleave(100, 0)
    assert chi_square_p(torch.bincount(seats.kinds[mixed], minlength=3)) > 1e-3
    pairs = torch.zeros(3, 3)  # who sat there before and after the end of a game
    neighbours = torch.zeros(2, 2)  # whether the two mixed seats of a game changed with its end
    for step in play(env, seats, 40):
        ended = mixed & step.done[:, None]
        assert torch.equal(step.kinds[~ended], step.next_kinds[~ended]), "swapped in the middle of a game"
        assert (step.kinds[:100, 0] == LEARNER).all() and (step.kinds[100:, 1] == LEARNER).all()
        assert (step.kinds[100:, 0] == 0).all()
        pairs += torch.bincount(3 * step.kinds[ended] + step.next_kinds[ended], minlength=9).view(3, 3)
        one, other = (step.kinds != step.next_kinds)[:100, 1:][step.done[:100]].long().unbind(1)
        neighbours += torch.bincount(2 * one + other, minlength=4).view(2, 2)
    assert pairs.sum() > 1500
    changed = torch.tensor([1 - prob * 2 / 3, prob * 2 / 3])
    assert prob == 0 or chi_square_p(neighbours.flatten(), changed.outer(changed).flatten()) > 1e-3, "each for itself"
    for old in range(3):
        expected = torch.full((3,), prob / 3)
        expected[old] += 1 - prob
        if prob == 0:
            assert pairs[old, expected == 0].sum() == 0
        else:
            assert chi_square_p(pairs[old], expected) > 1e-3


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize(("games", "deals"), [(1, 3), (2, 6), (3, 6), (7, 25), (64, 30)])
def test_the_first_players_are_dealt_evenly(games, deals, watch):
    """In each block and mixed seat every kind sits in E / P games, rounded up or down; where, a seed decides."""
    tables, count, found = [["learner", "mixed", "mixed"], ["mixed", "learner", "nearest_hare"]], len(POPULATION), []
    mixed = [
        (block, seat) for block, table in enumerate(tables) for seat in range(3) if watch or table[seat] == "mixed"
    ]
    for seed in range(30):
        _, seats = make(tables, games, seed=seed, watch=watch)
        kinds = seats.kinds.unflatten(0, (2, games))
        for block, seat in mixed:
            dealt = torch.bincount(kinds[block, :, seat], minlength=count)
            assert dealt.sum() == games and ((dealt == games // count) | (dealt == -(-games // count))).all()
        found.append([kinds[block, :, seat].tolist() for block, seat in mixed])
    for place in range(len(mixed)):
        own = [dealt[place] for dealt in found]
        assert len({str(dealt) for dealt in own}) >= deals, "each seed deals otherwise"
        assert {kind for dealt in own for kind in dealt[:1]} == set(range(count)), "every kind may come first"
    assert any(dealt[0] != dealt[1] for dealt in found), "each seat for itself"


def test_seats_are_dealt_independently_of_each_other():
    _, seats = make([["mixed"] * 3], 9000, watch=False)
    one, two, three = seats.kinds.unbind(1)
    for a, b in ((one, two), (two, three), (one, three)):
        assert chi_square_p(torch.bincount(3 * a + b, minlength=9)) > 1e-3


def test_who_switches_hunts_stag_in_one_game_and_hare_in_the_next():
    env, seats = make([["switching", "learner", "switching"]], games=400)
    stag, hare = (seats.names.index(name) for name in ("nearest_stag", "nearest_hare"))
    counts = [
        int(((seats.kinds[:, 0] == a) & (seats.kinds[:, 2] == b)).sum()) for a in (stag, hare) for b in (stag, hare)
    ]
    assert sum(counts) == 400 and chi_square_p(counts) > 1e-3
    games = torch.zeros(400, dtype=torch.int64)
    first = seats.kinds.clone()
    for step in play(env, seats, 30):
        flipped = torch.where((games % 2 == 1)[:, None] & (first != LEARNER), stag + hare - first, first)
        assert torch.equal(step.kinds, flipped)
        games += step.done
    assert games.min() >= 3


# ---------------------------------------------------------------------------------------------------------------------
# What can be known


def slow_posterior(config, seen, population, redraw, remember, mixed):
    """Plain Python: [(game before the step, seat, action, acted, done)] of one seat -> posteriors before each step"""
    prior = [1 / len(population)] * len(population)
    posterior, found = prior, []
    for game, seat, action, acted, done in seen:
        found.append(posterior)
        if acted:
            likelihood = [reference.player_probs(config, game, seat, name)[action] for name in population]
            joint = [p * max(chance, 1e-9) for p, chance in zip(posterior, likelihood, strict=True)]
            posterior = [p / sum(joint) for p in joint]
        if done:
            forget = (redraw if mixed else 0.0) if remember else 1.0
            posterior = [(1 - forget) * p + forget * q for p, q in zip(posterior, prior, strict=True)]
    return found


BAYES = [("game", True, 0), ("game", False, 0), ("never", True, 1), (0.3, True, 0), (0.3, False, 0)]


@pytest.mark.parametrize("redraw, remember, walls", BAYES)
def test_posterior_is_that_of_plain_bayes(redraw, remember, walls):
    config = StagHuntConfig(4, 5, num_players=3, num_stags=2, num_hares=2, final_time=6, max_wall_pieces=walls)
    population = ("nearest_hare", "random", "last_stag", "first_stag")
    tables = [["mixed", "learner", "nearest_hare"], ["mixed", "mixed", "noisy_stag"]]
    env, seats = make(tables, 4, config, population=population, redraw=redraw, remember=remember)
    steps = list(play(env, seats, 20))
    games = [games_of(step.state) for step in steps]
    for b in range(8):
        for i, name in enumerate(tables[b // 4]):
            if name == "learner":
                assert all((step.posterior[b, i] == 0.25).all() for step in steps)
                assert all(torch.equal(step.expected[b, i], step.probs[b, i]) for step in steps)
                continue
            seen = [
                (games[t][b], i, int(step.actions[b, i]), bool(step.present[b, i]), bool(step.done[b]))
                for t, step in enumerate(steps)
            ]
            expected = slow_posterior(config, seen, population, redraw_prob(redraw), remember, name == "mixed")
            for t, step in enumerate(steps):
                assert step.posterior[b, i].tolist() == pytest.approx(expected[t], abs=1e-5)
                table = torch.tensor([reference.player_probs(config, games[t][b], i, player) for player in population])
                mixture = (torch.tensor(expected[t])[:, None] * table).sum(0)
                torch.testing.assert_close(step.expected[b, i], mixture, atol=1e-5, rtol=0)
    assert sum(int(step.done.sum()) for step in steps) >= 24


def test_memory_keeps_what_many_games_showed_and_stays_finite():
    env, seats = make([["nearest_hare", "learner", "switching"]], games=16, remember=True)
    steps = list(play(env, seats, 80))
    assert (steps[-1].posterior[:, 0, seats.names.index("nearest_hare")] > 0.99).all()
    assert all(torch.isfinite(step.posterior).all() for step in steps)
    assert torch.isfinite(seats.log_posterior).all()
    torch.testing.assert_close(steps[-1].posterior.sum(2), torch.ones(16, 3))


def test_only_those_on_the_board_and_no_learners_are_judged():
    env, seats = make([["random", "nearest_stag", "learner"]], games=8, remember=True)
    seats.action_probs(env.state, torch.full((1, 8, 7), 1 / 7))
    no, yes = torch.zeros(8, dtype=torch.bool), torch.ones(8, dtype=torch.bool)
    stays = torch.full((8, 3), 4)
    seats.update(stays, torch.stack([no, no, no], 1), no)
    torch.testing.assert_close(seats.posterior(), torch.full((8, 3, 3), 1 / 3))
    seats.update(stays, torch.stack([yes, no, yes], 1), no)
    posterior = seats.posterior()
    torch.testing.assert_close(posterior[:, 1:], torch.full((8, 2, 3), 1 / 3))
    assert (posterior[:, 0, 0] > 0.99).all(), "only `random` stays where it could walk"


# ---------------------------------------------------------------------------------------------------------------------
# Saving and errors


def test_a_loaded_state_goes_on_bit_for_bit():
    tables = [["learner", "mixed", "switching"], ["mixed", "waiting", "learner"]]
    (env, seats), (other_env, other) = (make(tables, 6, seed=seed, redraw=0.5, remember=True) for seed in (1, 2))
    list(play(env, seats, 20))
    places = [x.data_ptr() for x in other.state_dict().values()]
    other_env.load_state_dict(env.state_dict())
    other.load_state_dict({name: x.clone() for name, x in seats.state_dict().items()})
    assert places == [x.data_ptr() for x in other.state_dict().values()], "in place"
    runs = []
    for pair in ((env, seats), (other_env, other)):
        torch.manual_seed(7)
        runs.append(list(play(*pair, 20)))
    for ours, expected in zip(*runs, strict=True):
        for x, y in zip(ours[1:], expected[1:], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("table", "options"),
    [
        (["learner", "learner"], {}),
        (["learner", "learner", "somebody"], {}),
        (["learner", "mixed", "learner"], {"population": "random,waiting"}),
        (["learner", "mixed", "learner"], {"population": "random,random"}),
        (["learner", "mixed", "learner"], {"redraw": "sometimes"}),
        (["learner", "mixed", "learner"], {"redraw": 1.5}),
    ],
)
def test_wrong_seats_are_refused(table, options):
    with pytest.raises(ValueError):
        Seats(StagHuntEnv(CONFIG, 6), [table], **options)


# ---------------------------------------------------------------------------------------------------------------------
# Unsteady places


def play_games(env, seats, steps):
    """-> what happened in each step: who played, their actions, who acted, likelihoods [B, N, P], done"""
    happened = []
    for _ in range(steps):
        kinds = seats.kinds.clone()
        even = torch.full((seats.num_learners, seats.num_envs, 7), 1 / 7)
        probs = seats.action_probs(env.state, None if seats.watch else even)
        table = seats._table[:, :, : len(seats.population)].clone()
        actions = sample(probs)
        _, present, done = env.advance(actions)
        seats.update(actions, present, done)
        happened.append((kinds, actions, present, table, done))
    return happened


def test_unsteady_places_change_after_each_game_and_the_others_never():
    tables = [["learner", "mixed", "nearest_hare"]] * 2
    env, seats = make(tables, games=40, redraw="never", remember=True, unsteady=0.25)
    first = seats.kinds.clone()
    happened = play_games(env, seats, 60)
    changes = torch.zeros(80)
    for (kinds, _, _, _, done), (after, *_) in itertools.pairwise(happened):
        changed = (kinds != after).any(1)
        assert not (changed & ~done).any(), "only between games"
        changes += changed
    unsteady = torch.arange(80) % 40 < 10  # of each block
    assert (changes[unsteady] > 0).all() and (changes[~unsteady] == 0).all()
    ended = torch.stack([done for *_, done in happened]).sum(0)[unsteady].sum()
    assert changes.sum() / ended == pytest.approx(2 / 3, abs=0.1), "a new one of three, also the same"
    assert (seats.kinds[:, 2] == first[:, 2]).all() and (seats.kinds[:, 0] == first[:, 0]).all()
    seats.settle()
    settled = seats.kinds.clone()
    play_games(env, seats, 60)
    assert (seats.kinds == settled).all()


def test_the_posterior_also_infers_whether_a_player_is_steady():
    """Against sums over all that may have been: the same player in all games, or another in each"""
    share = 0.25
    env, seats = make([["learner", "mixed", "mixed"]], games=30, redraw="never", remember=True, unsteady=share)
    happened = play_games(env, seats, 40)
    count = len(seats.population)
    for game_number in range(30):
        for seat in (1, 2):
            same = torch.full((count,), 1 / count, dtype=torch.float64)  # who it is, of one that stays
            now = same.clone()  # of one that is drawn anew in each game: in this one
            earlier_games = 1.0
            for _, actions, present, table, done in happened:
                if present[game_number, seat]:
                    likelihood = table[game_number, seat, :, actions[game_number, seat]].double().clamp(min=1e-9)
                    same = same * likelihood
                    now = now * likelihood
                if done[game_number]:
                    earlier_games = earlier_games * now.sum()
                    now = torch.full((count,), 1 / count, dtype=torch.float64)
            joint = (1 - share) * same + share * earlier_games * now
            expected = (joint / joint.sum()).float()
            torch.testing.assert_close(seats.posterior()[game_number, seat], expected, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(seats.posterior().sum(2), torch.ones(30, 3))


@pytest.mark.parametrize("population", ["random,nearest_stag,nearest_hare", "first_stag,last_stag"])
def test_every_second_game_has_a_team_of_one_kind_that_one_looks_on_at_random(population):
    tables = [["learner"] * 3] * 2
    options = {"population": population, "redraw": "never", "remember": True, "unsteady": 0.5}
    env, seats = make(tables, games=48, watch=True, teams=True, **options)
    number = torch.arange(96) % 48
    in_team = number % 2 == 1
    onlooker = torch.nn.functional.one_hot(number // 2 % 3, 3).bool()
    seen = []
    for kinds, *_ in play_games(env, seats, 80):
        others = kinds.clone()
        if "random" in population:
            assert (kinds[in_team][onlooker[in_team]] == seats.names.index("random")).all()
            others = others.masked_fill(onlooker, -1)
        highest = others.amax(1, keepdim=True)
        assert ((others == highest) | (others < 0))[in_team].all(), "all of one kind"
        seen.append(kinds)
    seen = torch.stack(seen)
    dealt = torch.cat([seen[0], onlooker.long().argmax(1, keepdim=True)], 1)[in_team]
    teams, how_often = dealt.unique(dim=0, return_counts=True)
    assert len(teams) == 3 * len(seats.population) and how_often.max() - how_often.min() <= 2, "dealt evenly"
    assert seen[:, in_team].flatten().unique().tolist() == list(range(len(seats.population))), "of any kind"
    steady = number >= 24
    assert (seen[:, steady] == seen[0, steady]).all()
    assert not (seen[:, ~steady & in_team] == seen[0, ~steady & in_team]).all(), "a new team after a game"
    assert len(seen[:, ~in_team].flatten(0, 1).unique(dim=0)) == len(seats.population) ** 3, "the others: anybody"


def test_a_player_that_is_redrawn_now_and_then_may_also_be_unsteady():
    """With --redraw 0.3: of a steady player, too, the next game is with another in 3 of 10 cases"""
    share, redraw = 0.25, 0.3
    env, seats = make([["learner", "mixed", "mixed"]], games=20, redraw=redraw, remember=True, unsteady=share)
    happened = play_games(env, seats, 40)
    count = len(seats.population)
    for place, seat in itertools.product(range(20), (1, 2)):
        joint = torch.tensor([[1 - share], [share]], dtype=torch.float64).expand(2, count) / count  # steady or not
        for _, actions, present, table, done in happened:
            if present[place, seat]:
                joint = joint * table[place, seat, :, actions[place, seat]].double().clamp(min=1e-9)
                joint = joint / joint.sum()
            if done[place]:
                forget = torch.tensor([[redraw], [1.0]], dtype=torch.float64)
                joint = (1 - forget) * joint + forget * joint.mean(1, keepdim=True)
        expected = joint.sum(0).float()
        torch.testing.assert_close(seats.posterior()[place, seat], expected, atol=1e-4, rtol=1e-3)


def test_the_posterior_does_not_know_that_all_have_settled():
    """Named players stay anyway: the same games, with the same beliefs"""
    found = []
    for settles in (False, True):
        env, seats = make([["learner", "nearest_hare", "random"]], games=20, remember=True, unsteady=0.5)
        if settles:
            seats.settle()
        play_games(env, seats, 30)
        found.append(seats.posterior())
    assert torch.equal(*found) and (found[0][:, 1] - 1 / 3).abs().max() > 0.1
