"""Who sits where: the map between seats and learners, and redraws between games."""

from typing import NamedTuple

from evaluation.strangers import SwitchingSeats as Seats
from stag_hunt_env import LEARNER, PLAYER_PROBS, POPULATION, StagHuntConfig, StagHuntEnv, State, sample

import pytest
import torch
from helpers import chi_square_p, seat_probs

CONFIG = StagHuntConfig(height=3, width=5, num_players=3, num_stags=2, num_hares=2, final_time=6)
TWO_TABLES = [["learner", "mixed", "learner"], ["nearest_hare", "learner", "switching"]]


def make(tables, games=3, config=CONFIG, seed=1, **options):
    torch.manual_seed(seed)
    env = StagHuntEnv(config, games * len(tables), seed=seed)
    return env, Seats(env, tables, **options)


class Step(NamedTuple):
    state: State  # before the step, and so are:
    kinds: torch.Tensor
    probs: torch.Tensor
    done: torch.Tensor
    next_kinds: torch.Tensor


def play(env, seats, steps):
    """Learners play at random"""
    for _ in range(steps):
        state = State(*(x.clone() for x in env.state))
        kinds = seats.kinds.clone()
        learner_probs = None
        if seats.num_learners and not seats.watch:
            legal = env.legal_actions(state)
            learner_probs = seats.to_learners(PLAYER_PROBS["random"](env, state, legal))
        probs = seats.action_probs(state, learner_probs)
        _, _, done = env.advance(sample(probs))
        seats.update(done)
        yield Step(state, kinds, probs, done, seats.kinds.clone())


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
    back = seats.to_seats(seats.to_learners(deep), deep + 1)
    assert torch.equal(back, torch.where(learns[..., None, None], deep, deep + 1))
    assert seats.has_rule_based
    _, everybody = make([["learner"] * 3] * 2)
    rows = [[10 * g + s for g in range(b, b + 3)] for b in (0, 3) for s in range(3)]
    assert everybody.to_learners(x).tolist() == rows and not everybody.has_rule_based
    assert torch.equal(everybody.to_seats(everybody.to_learners(x)), x)


def test_shared_parameters_make_one_learner_of_a_block():
    _, seats = make([["learner", "mixed", "learner"], ["learner", "learner", "random"]], share_parameters=True)
    x = numbered(6)
    rows = [[0, 10, 20, 2, 12, 22], [30, 40, 50, 31, 41, 51]]  # seat by seat
    assert seats.num_learners == 2 and seats.to_learners(x).tolist() == rows
    assert seats.learner_seat.tolist() == [[0, 0, 0, 2, 2, 2], [0, 0, 0, 1, 1, 1]]
    assert seats.per_learner(x[:, 0]).tolist() == [[0, 10, 20] * 2, [30, 40, 50] * 2]
    back = seats.to_seats(seats.to_learners(x), torch.full_like(x, -1))
    learns = torch.tensor([[True, False, True]] * 3 + [[True, True, False]] * 3)
    assert torch.equal(back, torch.where(learns, x, -1))
    _, everybody = make([["learner"] * 3] * 2, share_parameters=True)
    assert torch.equal(everybody.to_seats(everybody.to_learners(x)), x) and everybody.learner_seat.shape == (2, 9)


def test_everybody_plays_by_the_rule_of_who_sits_there():
    tables = [["learner", "mixed", "waiting"], ["last_stag", "learner", "switching"]]
    env, seats = make(tables, population=("nearest_hare", "first_stag"))
    seen = set()
    assert seats.names[:2] == ["nearest_hare", "first_stag"]
    for step in play(env, seats, 40):
        legal = env.legal_actions(step.state)
        for b in range(6):
            for i in range(3):
                kind = int(step.kinds[b, i])
                name = "random" if kind == LEARNER else seats.names[kind]  # learners play at random here
                assert torch.equal(step.probs[b, i], PLAYER_PROBS[name](env, step.state, legal)[b, i]), name
                seen.add((tables[b // 3][i], name))
    expected = {("learner", "random"), ("waiting", "waiting"), ("last_stag", "last_stag")}
    expected |= {("mixed", "nearest_hare"), ("mixed", "first_stag")}
    expected |= {("switching", "nearest_stag"), ("switching", "nearest_hare")}
    assert seen == expected


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
@pytest.mark.parametrize(("games", "deals"), [(1, 3), (2, 6), (7, 25)])
def test_the_first_players_are_dealt_evenly(games, deals, watch):
    """In each block and mixed seat every kind sits in E / P games, rounded up or down; where, a seed decides."""
    tables, count, found = [["learner", "mixed", "mixed"], ["mixed", "learner", "nearest_hare"]], len(POPULATION), []
    places = [(block, seat) for block in (0, 1) for seat in range(3)]
    mixed = [(block, seat) for block, seat in places if watch or tables[block][seat] == "mixed"]
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
    _, seats = make([["mixed"] * 3], 9000)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert chi_square_p(torch.bincount(3 * seats.kinds[:, one] + seats.kinds[:, other], minlength=9)) > 1e-3


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


def test_unsteady_places_change_after_each_game_and_the_others_never():
    tables = [["learner", "mixed", "nearest_hare"]] * 2
    env, seats = make(tables, games=40, redraw="never", unsteady=0.25)
    first = seats.kinds.clone()
    changes, ends = torch.zeros(2, 80)
    for step in play(env, seats, 60):
        changed = (step.kinds != step.next_kinds).any(1)
        assert not (changed & ~step.done).any(), "only between games"
        changes += changed
        ends += step.done
    unsteady = torch.arange(80) % 40 < 10  # of each block
    assert (changes[unsteady] > 0).all() and (changes[~unsteady] == 0).all()
    assert changes.sum() / ends[unsteady].sum() == pytest.approx(2 / 3, abs=0.1), "a new one of three, also the same"
    assert (seats.kinds[:, 2] == first[:, 2]).all() and (seats.kinds[:, 0] == first[:, 0]).all()


@pytest.mark.parametrize("population", ["random,nearest_stag,nearest_hare", "first_stag,last_stag"])
def test_every_second_game_has_a_team_of_one_kind_that_one_looks_on_at_random(population):
    tables = [["learner"] * 3] * 2
    options = {"population": population, "redraw": "never", "unsteady": 0.5}
    env, seats = make(tables, games=48, watch=True, teams=True, **options)
    number = torch.arange(96) % 48
    in_team = number % 2 == 1
    onlooker = torch.nn.functional.one_hot(number // 2 % 3, 3).bool()
    seen = []
    for _, kinds, *_ in play(env, seats, 80):
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


def test_wrong_seats_and_options_are_refused():
    for table, options in (
        ("learner,learner", {}),
        ("learner,mixed,somebody", {}),
        ("learner,mixed,random", {"redraw": 1.5}),
        ("learner,mixed,random", {"population": "random,random"}),
    ):
        with pytest.raises(ValueError):
            make([table], **options)
