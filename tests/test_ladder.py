"""Games in which it pays to know the others: scripted hunters, games together, the ladder of experiments"""

import csv
import dataclasses

import numpy as np
import pytest
import torch

import hopplus_ppo as hop
import stag_hunt_env as game
from benchmarks import experiments, scripted
from benchmarks.baselines import ppo_gru
from evaluation import partners

SMALL = game.StagHuntConfig(num_stags=2, final_time=5)


def test_scripted_hunters_earn_more_the_more_they_know():
    args = scripted.Args(places=600, games=10, redraw="game", device="cpu", config=SMALL)
    found = {hunter: float(scripted.play(args, hunter).mean()) for hunter in scripted.HUNTERS}
    assert found["hares"] == pytest.approx(0.83, abs=0.03)
    assert found["follow"] == pytest.approx(2.50, abs=0.12)
    assert found["Bayes"] == pytest.approx(2.79, abs=0.12)
    assert found["told"] == pytest.approx(3.16, abs=0.12)
    stays = dataclasses.replace(args, redraw="never")
    bayes, told = (float(scripted.play(stays, hunter).mean()) for hunter in ("Bayes", "told"))
    assert told - bayes < 0.06  # after a game or two nothing is left to be told


def test_a_told_hunter_goes_where_its_partner_goes():
    env = game.StagHuntEnv(SMALL, 200, "cpu", 3)
    seats = game.Seats(env, [["nearest_hare", "mixed", "nearest_hare", "nearest_hare"]], False, scripted.GOALS)
    goal, partner = scripted.choose_goal("told", env, seats), seats.kinds[:, 1]
    assert (goal[partner == 2] == 2).all()
    hunts = partner < 2
    assert ((goal == partner) | (goal == 2))[hunts].all()
    late = (goal == 2) & hunts  # only where the stag is out of reach
    for bound, number in (("first", 0), ("last", 1)):
        distance = env.distance_to_prey(env.state, game.HUNT_STAG, bound).gather(1, env.state.position[:, :2].long())
        assert torch.equal((distance.amax(1) >= 5)[partner == number], late[partner == number])


@pytest.mark.parametrize(("others", "expected"), [
    (("nearest_stag",) * 3, 2.88),
    (("nearest_hare",) * 3, 0.95),
    (("random",) * 3, 1.01),
    (("nearest_stag", "nearest_stag", "nearest_hare"), 3.58),
    (("random", "nearest_hare", "nearest_stag"), 4.98),
])  # fmt: skip
def test_a_bayes_hunter_finds_out_who_hunts_with_it(others, expected):
    config = game.StagHuntConfig(height=8, width=8)
    args = scripted.Args(places=600, games=1, device="cpu", config=config)
    returns = scripted.play(args, "", [*others[:1], "learner", *others[1:]])
    assert float(returns.mean()) == pytest.approx(expected, abs=3.5 * float(returns.std()) / 600**0.5 + 0.01)


def test_where_a_bayes_hunter_goes():
    """Its posterior is set by hand: who comes to which stag is then known, and the rest is arithmetic."""
    config = game.StagHuntConfig(height=4, width=6, num_stags=2, final_time=9)
    env = game.StagHuntEnv(config, 400, "cpu", 3)
    env.state.time.copy_(torch.randint(0, 9, (400,)))
    env.state.present[:100, 3] = False
    population = ("first_stag", "last_stag", "nearest_stag", "nearest_hare")
    seats = game.Seats(env, [["nearest_hare", "nearest_hare", "learner", "nearest_hare"]], population=population)
    logits = 3 * torch.randn(400, 4, 4, generator=torch.manual_seed(4)) + 5 * torch.eye(4)[3]  # often a hare hunter
    seats.log_posterior.copy_(logits.log_softmax(2))
    probs, posterior, seen = scripted.bayes_probs(env, seats), seats.posterior(), {"stag": 0, "hare": 0}
    assert probs.shape == (1, 400, 7)
    position, prey = env.state.position.tolist(), env.state.prey_position.tolist()
    for b in range(400):
        left = 9 - int(env.state.time[b])
        distance = [[abs(c // 6 - q // 6) + abs(c % 6 - q % 6) for c in position[b]] for q in prey[b]]
        pays = []
        for s in (0, 1):
            nobody = 1.0
            for i in (0, 1, 3):
                kinds = prey[b][s] < prey[b][1 - s], prey[b][s] > prey[b][1 - s], distance[s][i] <= distance[1 - s][i]
                comes = sum(float(posterior[b, i, k]) for k in range(3) if kinds[k])
                in_time = max(distance[s][i], distance[s][2]) < left and bool(env.state.present[b, i])
                nobody *= 1 - comes * in_time
            pays.append(5 * (1 - nobody))
        nearest = min(distance[q][2] for q in range(2, 6))
        hare = float(nearest < left)
        stag = max(pays) > hare
        if max(pays) == hare == 0 or abs(max(pays) - hare) < 1e-4 or (stag and abs(pays[0] - pays[1]) < 1e-4):
            continue  # a tie
        goals = [prey[b][pays.index(max(pays))]] if stag else [prey[b][q] for q in range(2, 6)]
        seen["stag" if stag else "hare"] += 1
        for action in probs[0, b].nonzero().flatten().tolist():
            if action in (game.HUNT_STAG, game.HUNT_HARE):
                assert position[b][2] in goals and (action == game.HUNT_STAG) == stag
            else:
                cell = position[b][2] + (-6, 6, -1, 1)[action]
                steps = [abs(cell // 6 - q // 6) + abs(cell % 6 - q % 6) for q in goals]
                assert min(steps) == (distance[prey[b].index(goals[0])][2] if stag else nearest) - 1
    assert min(seen.values()) > 60, seen


def test_games_are_counted_place_by_place():
    done = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()  # [T, B]: 2 seeds, 2 places
    returns = torch.arange(16.0).view(4, 4)
    found = partners.by_game(lambda: (done, returns), 2, 2, 2)
    # first games: returns 0, 5 and 10, 3; second: 8, 9 and 14, 7
    assert found.tolist() == [[2.5, 8.5], [6.5, 10.5]]


def flags(tmp_path, *words):
    small = ["--num-stags", "2", "--final-time", "5", "--num-envs", "8", "--num-steps", "8", "--total-timesteps", "64"]
    seats = ["--seats", "learner,mixed,nearest_hare,nearest_hare", "--population", ",".join(scripted.GOALS)]
    return [
        *small,
        *seats,
        "--redraw",
        "never",
        "--num-seeds",
        "2",
        "--device",
        "cpu",
        "--run-dir",
        str(tmp_path),
        *words,
    ]


def rows_of(tmp_path):
    (path,) = tmp_path.glob("*/partners.csv")
    return list(csv.DictReader(path.open()))


def test_partners_of_both_kinds_of_learners(tmp_path):
    words = flags(tmp_path / "told", "--method", "ppo-omg", "--subgoals", "oracle", "--num-pictures", "0")
    told = hop.main(hop.parse_args(words))["checkpoint"]
    args = partners.Args(paths=(told,), places=40, num_games=3, device="cpu")
    found = partners.main(args)
    rows = rows_of(tmp_path / "told")
    assert [(row["seed"], row["game"]) for row in rows] == [(s, g) for s in "01" for g in "123"]
    assert np.mean([float(row["return"]) for row in rows]) == pytest.approx(found["return"])
    assert found.keys() == {"return", "shuffled"}
    none = hop.main(hop.parse_args(flags(tmp_path / "none", "--method", "ppo", "--num-pictures", "0")))["checkpoint"]
    assert partners.main(dataclasses.replace(args, paths=(none,))).keys() == {"return"}
    ppo_gru.main(ppo_gru.parse_args(flags(tmp_path / "gru", "--hidden", "8")))
    paths = tuple(str(path) for path in sorted((tmp_path / "gru").glob("ppo_gru__*")))
    assert len(paths) == 2
    assert partners.main(dataclasses.replace(args, paths=paths)).keys() == {"return"}
    assert len(rows_of(tmp_path / "gru")) == 6


def test_shuffled_subgoals_are_those_of_another_place(tmp_path, monkeypatch):
    words = flags(tmp_path, "--method", "ppo-omg", "--subgoals", "oracle", "--num-pictures", "0")
    checkpoint = hop.main(hop.parse_args(words))["checkpoint"]
    seen, load_run = [], partners.evaluate.load_run

    def watched(*given):
        run = load_run(*given)
        own = run.script.evaluate_policy

        def watch(*inputs):
            seen.append(inputs[-1])
            return own(*inputs)

        run.script.evaluate_policy = watch
        return run

    monkeypatch.setattr(partners.evaluate, "load_run", watched)
    args = partners.Args(paths=(checkpoint,), places=7, num_games=1, device="cpu")
    for shuffled in (False, True):
        partners.of_script(args, checkpoint, shuffled)
    first, second = seen[0], seen[len(seen) // 2]  # both plays begin with the same partners
    assert torch.equal(first.roll(1, 1), second) and not torch.equal(first, second)


def test_intervals_are_students():
    mean, low, high = experiments.interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx((2.0, 2.0 - 2.4841, 2.0 + 2.4841), abs=1e-3)
    rows = [{"run": run, "seed": str(seed), "return": str(value)} for run, values in
            (("a", (3.0, 5.0, 4.0)), ("b", (1.0, 3.5, 1.5))) for seed, value in enumerate(values)]  # fmt: skip
    assert experiments.paired(rows, "a", "b") == pytest.approx((2.0, 2.0 - 1.2421, 2.0 + 1.2421), abs=1e-3)
    assert experiments.paired(rows, "a", "c") is None


def test_steps_to_a_return():
    lines = ["0 10 1.0", "0 20 2.0", "0 30 1.9", "1 10 1.0"]
    rows = [dict(zip(("seed", "steps", "return"), line.split(), strict=True)) | {"run": "a"} for line in lines]
    rows.append({"run": "a", "seed": "1", "steps": "20", "return": ""})
    assert experiments.steps_to(rows, "a", 1.9) == [20.0, np.inf]


def test_every_arm_of_the_ladder_is_a_valid_command():
    for task in experiments.TASKS:
        for label, run in experiments.arms(task).items():
            words = [*run.flags.split(), "--device", "cpu"]
            if run.script == experiments.GRU:
                args = ppo_gru.parse_args(words)
                assert args.keep_state == ("--redraw" in run.flags and "--redraw game" not in run.flags)
            else:
                args = hop.parse_args(words)
                hop.validate(args)
                assert args.subgoals == {"told": "oracle", "HOP+": "inferred"}.get(label, label)
            assert (args.seed, args.num_seeds) == (11, 10)  # settings were chosen with seeds 1 to 5
