"""runs.py and adapt.py: a run is loaded, its learners sit beside others, frozen or learning"""

import csv
import itertools
import math
import re
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
import stag_hunt_env as game
from evaluation import adapt, runs

import numpy as np
import pytest
import torch
from helpers import record_learning_rates, untrained

ROOT = Path(game.__file__).resolve().parent
FAST = {"steps": 32, "every": 8, "repetitions": 6, "games": 2, "imagined_games": 4, "rounds": 1, "learning_rate": 2e-3}
FAST |= {"moa_updates": 2, "device": "cpu", "best_response_steps": 64}


@pytest.fixture(scope="module")
def folder(trained):
    return trained("hopplus")


@pytest.fixture(autouse=True)
def few_games(monkeypatch):
    monkeypatch.setitem(adapt.BEST_RESPONSE, "num_envs", 8)
    monkeypatch.setitem(adapt.BEST_RESPONSE, "num_steps", 16)
    monkeypatch.setattr(adapt, "draw", lambda path, *_: path.touch())


def load(folder, script=None):
    return runs.load_run(str(folder), script, "cpu")


def arguments(folder, **flags):
    usual = {"run": str(folder), "seats": ("learner,random,nearest_hare",)}
    return adapt.Args(**{**FAST, **usual, **flags})


def weights(network):
    return {name: p.detach().clone() for name, p in network.params.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refusal(function, *given):
    """The one line that a tool ends with"""
    with pytest.raises(SystemExit) as stop:
        function(*given)
    text = str(stop.value)
    assert text.startswith("error: ") and "\n" not in text
    return text


# ---- Loading and seating


def test_learners_are_loaded_one_by_one(folder):
    """Each row of each network is another one; learner m gets row numbers[m]"""
    run = load(folder)
    numbers = [5, 0, 3]
    state = runs.seat_learners(run, [["learner"] * 3], numbers)
    for name, network in state.networks.items():
        saved = run.networks[name]
        assert equal(weights(network), {key: p[numbers] for key, p in saved.items()}), name
    first = run.networks["policy"]["actor.weight"]
    assert all((first[a] != first[b]).any() for a, b in itertools.combinations(range(6), 2))


@pytest.mark.parametrize("shared", [False, True])
def test_who_takes_a_seat(shared, tmp_path):
    """Who was trained in it, else the first of the seed; seeds take turns"""
    seats = "random,learner,learner"
    run = load(untrained(tmp_path, seats=seats, share_parameters=shared, num_seeds=2))
    found = [[runs.learner_number(run, seed, seat) for seat in range(3)] for seed in range(3)]
    assert found == ([[0] * 3, [1] * 3, [0] * 3] if shared else [[0, 0, 1], [2, 2, 3], [0, 0, 1]])


def test_what_is_carried_over_is_what_was_in_training(tmp_path):
    """Who met new players in every game remembers nothing, also where they stay"""
    for seats, kept in (("learner,mixed,mixed", 0.0), ("learner,learner,learner", 0.9)):
        run = load(untrained(tmp_path / seats, "ppo-omg", seats=seats))
        state = runs.seat_learners(run, [["learner", "random", "random"]], [0])
        assert state.args.history_decay == kept and state.args.history_reset_prob == 0


def test_an_edited_copy_is_loaded(tmp_path, trained):
    """Another policy network and an intrinsic reward, of which no tool's score knows"""
    text = (ROOT / "hopplus_ppo.py").read_text()
    wider = text.replace(
        "mlp(inputs + self.padding, hidden, hidden,", "mlp(inputs + self.padding, hidden, hidden, hidden,"
    )
    edited = wider.replace("    return payoff\n", "    return payoff + 100\n")
    assert text != wider != edited
    copy = tmp_path / "my_copy.py"
    copy.write_text(edited)
    folder = untrained(tmp_path / "run", "ppo", script=runs.load_script(copy), num_seeds=2)
    rows = adapt.main(arguments(folder, script=str(copy), repetitions=2))
    assert {row["mode"] for row in rows} == {"random", "Bayes hunter", "frozen", "learning", "best response"}
    assert all(0 <= row["score"] <= 5 for row in rows)
    text = refusal(adapt.main, arguments(folder, script=str(ROOT / "hopplus_ppo.py")))
    assert "the run does not fit the script: only one of them has trunk.4" in text
    assert "there is no" in refusal(load, folder), "the copy does not lie beside the scripts"


def test_what_is_no_checkpoint_is_named(folder, tmp_path):
    (tmp_path / "cut.pt").write_bytes((folder / "checkpoint.pt").read_bytes()[:500])
    assert "cut.pt is damaged, or no checkpoint" in refusal(load, tmp_path / "cut.pt")
    hopplus_ppo.write_checkpoint(tmp_path / "model.pt", {"format": "pretrain_world_model 11", "networks": {}})
    text = refusal(load, tmp_path / "model.pt")
    assert text.endswith("model.pt is a checkpoint of pretrain_world_model 11, not of a training script")
    (tmp_path / "second_seed").mkdir()
    assert "of several seeds, the first one's folder has it" in refusal(load, tmp_path / "second_seed")
    wide = load(untrained(tmp_path / "wide", policy_hidden=16))
    wide.args.policy_hidden = 8
    text = refusal(runs.seat_learners, wide, [["learner"] * 3], [0, 1, 2])
    assert re.search(r"encoder.table is \[3, \d+, 32\], in the script \[3, \d+, 16\]", text)


def test_tools_call_twelve_functions_of_a_script():
    assert len(runs.CALLED) == 12 + 2, "besides Args and TrainState"
    for script in (hopplus_ppo, hopplus_mcts):
        missing = [name for name in runs.CALLED if not hasattr(script, name)]
        assert missing == (["plan_actions"] if script is hopplus_ppo else [])
    for path in (ROOT / "evaluation").glob("*.py"):
        called = set(re.findall(r"\bscript\.(\w+)", path.read_text()))
        others = {"act", "remember", "__file__"}  # two of ppo_gru.py
        assert called - others <= {*runs.CALLED}, path.name


# ---- Who meets whom, and scores


def test_the_sets(folder, tmp_path):
    four = load(untrained(tmp_path))._replace(args=hopplus_ppo.default_args("ppo", "cpu"))
    sets = adapt.deal_seats(adapt.Args(), four, {})
    assert sets["2 NS + NH"] == ["learner", "nearest_stag", "nearest_stag", "nearest_hare"] and len(sets) == 7
    sets = adapt.deal_seats(adapt.Args(sets="strangers"), four, {})
    assert sets["noisy NS + 2 noisy NH"][1:] == ["noisy_stag", "noisy_hare", "noisy_hare"]
    seats = ("learner,waiting,waiting,waiting", "random,learner,nearest_stag,nearest_hare")
    sets = adapt.deal_seats(adapt.Args(seats=seats), four, {})
    assert sets["3 waiting"] == ["learner", "waiting", "waiting", "waiting"]
    assert sets["NS + NH + random"] == seats[1].split(","), "in ego order"


def test_what_cannot_be_played_is_named(folder):
    for flags, sentence in (
        ({"seats": ("learner,learner,random",)}, "learner,learner,random: not one learner"),
        ({"seats": ("learner,mixed,random",)}, "2 named co-players"),
        ({"seats": ("learner,nobody,random",)}, "--seats: unknown players"),
        ({"steps": 40}, "--steps must be 4, 8, ... times --every, and that a game, 6 steps"),
        ({"every": 4, "steps": 16}, "a game, 6 steps"),
        ({"learning_rate": -1.0}, "learning rates must be above 0, not -1.0"),
        ({"sets": "learned"}, "--sets learned needs --others"),
    ):
        assert sentence in refusal(adapt.main, arguments(folder, **flags))


def played(monkeypatch, module, name="rollout"):
    """-> a list to which each call adds (what was given, what came back)"""
    calls, own = [], getattr(module, name)

    def watched(*given, **more):
        result = own(*given, **more)
        calls.append((given, result))
        return result

    monkeypatch.setattr(module, name, watched)
    return calls


def test_adaptation(folder, capsys, monkeypatch):
    """Two sets, two seeds of three learners; scores are those of the last of four rounds"""
    seats = ("learner,nearest_hare,random", "random,learner,nearest_stag")
    seated = played(monkeypatch, adapt.frozen_players, "seat_beside")
    earned = played(monkeypatch, adapt, "learner_sums")
    rows = adapt.main(arguments(folder, seats=seats))
    names = ["NH + random", "NS + random"]
    tables = [text.split(",") for text in seats]
    modes = ["random", "Bayes hunter", "frozen", "learning"]
    assert len(rows) == 2 * (len(modes) * 6 + 1)
    states = [state for _, state in seated]
    for (run, given, numbers, *_), state in seated[:4]:
        assert given == [tables[0]] * 6 + [tables[1]] * 6
        assert numbers == [0, 3, 1, 4, 2, 5] * 2, "every learner, the seeds in turn"
        assert state.env.num_envs == 12 * 2 and run.folder == folder
    run = seated[0][0][0]
    assert not any(p.any() for p in states[0].networks["policy"].params.values()), "random: all logits 0"
    for network in ("policy", "moa"):
        saved = {name: p[numbers] for name, p in run.networks[network].items()}
        assert equal(weights(states[2].networks[network]), saved), "frozen"
    assert seated[4][0][1] == tables and seated[4][1].args.method == "ppo", "best responses"

    curves = torch.stack([found for _, found in earned[:16]]).view(4, 4, 2, 6, 2).double()
    for k, mode in enumerate(modes):
        for s, name in enumerate(names):
            own = [row for row in rows if (row["mode"], row["co_players"]) == (mode, name)]
            assert [(row["repetition"], row["seed"]) for row in own] == [(r, 1 + r % 2) for r in range(6)]
            for r, row in enumerate(own):
                returns, games = curves[k, :, s, r].unbind(1)
                assert row["score"] == pytest.approx(float(returns[3] / games[3]))
                for number in range(4):
                    mean = float(returns[number] / max(1, games[number]))
                    assert row[f"return at {8 * (number + 1)}"] == pytest.approx(mean)
    hunter = [row["score"] for row in rows if (row["mode"], row["co_players"]) == ("Bayes hunter", names[1])]
    assert np.mean(hunter) > 4, "it hunts with its partner"
    title = "adaptation_learner-nearest_hare-random_random-learner-nearest_stag"
    with open(folder / f"{title}.csv", newline="") as file:
        assert [row["score"] for row in csv.DictReader(file)] == [str(row["score"]) for row in rows]

    said = capsys.readouterr().out
    assert "games that ended in the last 8 of 32 steps; in brackets: random 0, best response 1" in said
    scores = {}
    for row in rows:
        if row["co_players"] == names[0]:
            scores.setdefault(row["mode"], []).append(row["score"])
    low, high = np.mean(scores["random"]), scores["best response"][0]
    seeds = [np.mean(scores["frozen"][seed::2]) for seed in (0, 1)]
    half = 12.7062 * abs(seeds[0] - seeds[1]) / 2
    norm = (np.mean(seeds) - low) / (high - low)
    assert f"{np.mean(seeds):.3f} ± {half:.3f} ({norm:.2f})" in said


def test_what_was_earned_is_the_learners(folder):
    """In every game whose end a round sees, whichever seat the learner has"""
    run = load(folder)
    tables = [["learner", "random", "random"], ["nearest_hare", "random", "learner"]]
    state = adapt.frozen_players.seat_beside(run, tables, [0, 4], {}, num_envs=5, num_steps=20)
    expected = torch.zeros(2, 2)
    advance = state.env.advance

    def watched(actions):
        outcome = advance(actions)
        for b in outcome[2].nonzero().flatten().tolist():
            seat = (0, 2)[b // 5]
            expected[b // 5] += torch.tensor([float(state.env.final_return[b, seat]), 1.0])
        return outcome

    state.env.advance = watched
    _, sums = run.script.rollout(state, state.games)
    assert expected[:, 1].min() > 10 and expected[:, 0].min() > 0
    torch.testing.assert_close(adapt.learner_sums(sums, torch.tensor([0, 2])), expected)


def test_a_best_response_is_scored_in_new_games(folder, monkeypatch):
    """Which is what its last rollouts saw, and its learning rate falls"""
    run = load(folder)
    rates = record_learning_rates(monkeypatch)
    rollouts = played(monkeypatch, hopplus_ppo)
    tables = [["learner", "random", "random"], ["random", "nearest_hare", "learner"]]
    args = arguments("", best_response_steps=3 * 8 * 16)
    with adapt.tqdm(disable=True) as bar:
        best = adapt.best_responses(args, run, tables, {}, bar)
    assert rates == [pytest.approx([rate for rate in (1e-3, 7e-4, 4e-4) for _ in range(4 * 4)])]
    last = [sums for _, (_, sums) in rollouts[5:]]
    assert len(last) == 4
    for k, seat in enumerate((0, 2)):
        returns, games = (sum(float(x[f"games/{name}"][k, seat]) for x in last) for name in ("return", "ended"))
        assert best[k] == pytest.approx(returns / games)


# ---- How a learner learns


def adaptation(run, numbers=(0, 4), learns=True, **flags):
    """Of these learners, in the first seat beside a random player and a hunter of hares"""
    args = arguments("", **flags)
    changes = {**adapt.LEARNING, "num_envs": 2, "num_steps": 8, "learning_rate": FAST["learning_rate"]}
    changes |= {"imagination": "world" in run.networks, "imagination_horizon": 6, "planner": "none"}
    tables = [["learner", "random", "nearest_hare"]] * len(numbers)
    state = runs.seat_learners(run, tables, list(numbers), **changes)
    return state, adapt.Adaptation(args, run, state, list(numbers))


def play(run, state):
    steps, _ = run.script.rollout(state, state.games)
    return {name: x[:, :, :1] for name, x in steps.items()}


def test_moas_head_learns_from_all_that_was_seen(folder):
    """By plain gradient descent on the actions of who was there; encoder and q_phi stay"""
    run = load(folder)
    state, learning = adaptation(run)
    before = {name: weights(network) for name, network in state.networks.items()}
    rounds = [play(run, state) for _ in range(2)]
    batches = []
    own = learning.moa_nll

    def noted(steps):
        if torch.is_grad_enabled():
            batches.append(steps)
        return own(steps)

    learning.moa_nll = noted
    for number, steps in enumerate(rounds):
        learning.learn(steps)
        seen = torch.cat([x["board"][:, :, 0] for x in rounds[: number + 1]], 1)
        assert len(batches) == 2 * (number + 1)
        rates = learning.optimizer.param_groups[0]["lr"], float(state.optimizers["policy"].learning_rate)
        expected = learning.args.moa_learning_rate / math.sqrt(number + 1), 2e-3 / (number + 1)
        assert rates == pytest.approx(expected), "fast at first"
        assert batches[-1]["board"].shape[:2] == (2, adapt.MOA_BATCH)
        for board in batches[-1]["board"][1, :50]:
            assert (seen[1] == board).all(1).any(), "its own steps"
    drawn = {tuple(board.tolist()) for board in batches[-1]["board"][0]}
    assert drawn == {tuple(board.tolist()) for board in seen[0]}, "all rounds"
    for name, network in state.networks.items():
        if name not in ("moa", "policy"):
            assert equal(weights(network), before[name]), name
    for name, p in learning.new_moa.items():
        moved = (p != before["moa"][name]).flatten(1).any(1)
        assert moved.tolist() == [name.startswith("head.")] * 4, name
        if name.startswith("head."):  # of learner m about co-player k: number m * 2 + k
            differ = [bool((p[a] != p[b]).any()) for a, b in itertools.combinations(range(4), 2)]
            assert all(differ), "each co-player has its own"
    newest = {name: x[:, :, 0] for name, x in steps.items() if name != "value"}
    torch.manual_seed(1)
    found = own(newest)
    torch.manual_seed(1)
    probs, present, actions = (x.detach() for x in runs.predict_others(run, state, newest))
    for m, k in itertools.product(range(2), range(2)):
        there = present[m, :, k].nonzero().flatten().tolist()
        told = [-math.log(float(probs[m, t, k, actions[m, t, k]])) for t in there]
        assert found[2 * m + k].item() == pytest.approx(sum(told) / len(told), rel=1e-4)
    assert not present.all()


@pytest.mark.parametrize("method", ["hopplus", "hop"])
def test_each_co_player_has_a_copy_of_moa(method, tmp_path):
    """They predict as MOA does, until one of them is changed: then of its co-player alone"""
    hop = {"script": hopplus_mcts, "goal_dim": 2} if method == "hop" else {}
    run = load(untrained(tmp_path, method, num_seeds=2, **hop))
    tables = [["learner", "random", "nearest_hare"]] * 2
    alone = runs.seat_learners(run, tables, [0, 4], num_envs=2, num_steps=8, planner="none")
    steps = {name: x[:, 0] for name, x in play(run, alone).items() if name != "value"}
    state = runs.seat_learners(run, tables, [0, 4], imagination=False, planner="none")
    learning = adapt.Adaptation(arguments(""), run, state, [0, 4])

    def predict(state):
        torch.manual_seed(1)
        return runs.predict_others(run, state, steps)[0].detach()

    before = predict(state)
    torch.testing.assert_close(before, predict(alone))
    bias = learning.moa.params["head.4.bias"].data
    bias[-1] += torch.arange(7.0)  # of learner 1 about co-player 1, or about all
    changed = (predict(state) != before).any(3).any(1).tolist()  # [M, K]
    assert changed == [[False] * 2, [method == "hop", True]] and len(bias) == (2 if method == "hop" else 4)


def assert_used(network, better, new, old):
    """Of learner m the new weights if better[m]"""
    for name, p in network.params.items():
        for m, is_better in enumerate(better):
            assert torch.equal(p[m], (new if is_better else old)[name][m]), name


def test_a_learned_moa_is_used_where_it_predicted_better(folder):
    """The newest steps, before it learned from them; learning goes on, used or not"""
    run = load(folder)
    better = [False, True, True, False]  # co-players of two learners
    state, learning = adaptation(run)
    before, judged = weights(learning.moa), []

    def surprise(params, steps):
        judged.append(params)
        worse = torch.tensor([float(b) for b in better])
        return 2 + worse * (1.0 if len(judged) % 2 else -1.0)  # first the old one, then the new

    learning.surprise = surprise
    learned = []
    for _ in range(3):
        learning.learn(play(run, state))
        learned.append(learning.new_moa)
    assert all(equal(params, before) for params in (*judged[::2], judged[1]))
    assert equal(judged[3], learned[0]) and equal(judged[5], learned[1])
    assert not equal(learned[0], learned[1])
    assert_used(learning.moa, better, learned[-1], before)


def test_a_learned_policy_is_used_where_it_earns_more_in_imagination(folder):
    """Against the one that it came with; learning goes on, used or not"""
    run = load(folder)
    better = torch.tensor([False, True])
    state, learning = adaptation(run)
    before, judged, started = weights(learning.policy), [], []

    def imagined_return(params):
        judged.append(params)
        return better * float(len(judged) % 2 == 0), 0.01 * len(judged) * torch.ones(2, 1)  # first the old one

    learning.imagined_return = imagined_return
    update = run.script.ppo_update
    run.script.ppo_update = lambda *given: started.append(weights(learning.policy)) or update(*given)
    learned = []
    for _ in range(2):
        learning.learn(play(run, state))
        learned.append(learning.new_policy)
    assert all(equal(params, before) for params in judged[::2])
    assert all(map(equal, judged[1::2], learned)) and all(map(equal, started, [before, learned[0]]))
    assert_used(learning.policy, better, learned[-1], before)
    assert any((learned[-1][name] != before[name]).any() for name in before)


def test_the_guard_counts_the_latest_rounds_most(folder):
    """By how many standard errors the new policies of two learners earn more, round by round"""
    margins = torch.tensor([[0.9, 3.0], [0.9, -1.1], [0.9, -1.1]])
    _, learning = adaptation(load(folder))
    learning.new_policy = {name: p + 1 for name, p in learning.old_policy.items()}
    old = weights(learning.policy)["actor.bias"]
    used = []
    for margin in margins:
        # Rows that deviate alike say nothing about which policy is better
        found = iter([(torch.zeros(2), torch.tensor([[5.0, 1.0]] * 2)), (margin, torch.tensor([[5.0, 0.0]] * 2))])
        learning.imagined_return = lambda params, found=found: next(found)
        learning.choose_policy()
        now = weights(learning.policy)["actor.bias"]
        used.append([bool(torch.equal(now[m], old[m] + 1)) for m in range(2)])
    # 0.9 < 1; 0.8 * 0.9 + 0.9 = 1.62, 0.8 * 3 - 1.1 = 1.3 > sqrt(1 + 0.64) = 1.28; -0.06 < 1.43
    assert used == [[False, True], [True, True], [True, False]]


def test_both_policies_imagine_with_the_same_random_numbers(folder):
    run = load(folder)
    _, learning = adaptation(run)
    drawn = []
    imagine = run.script.imagine
    run.script.imagine = lambda state: drawn.append(torch.get_rng_state()) or imagine(state)
    learning.learn(play(run, learning.state))
    learning.choose_policy()
    *_, old, new, next_old, next_new = drawn
    assert torch.equal(old, new) and torch.equal(next_old, next_new) and not torch.equal(new, next_old)


def test_imagined_returns_are_of_whole_games_as_the_game_pays(folder):
    """By hand: a row is one game after another; what is under way at its end does not count"""
    run = load(folder)
    _, learning = adaptation(run)
    generator = torch.Generator().manual_seed(1)
    shape = 2, 6, 50  # [M, h, n]
    samples = {
        "ended": torch.rand(shape, generator=generator) < 0.3,
        "mask": torch.rand(shape, generator=generator) < 0.9,
        "payoff": torch.rand(shape, generator=generator),
        "reward": torch.full(shape, math.nan),
    }
    run.script.imagine = lambda _: samples
    mean, error = learning.imagined_return(learning.old_policy)
    for m in range(2):
        paid, games = np.zeros(50), np.zeros(50)
        for n in range(50):
            ends = [t for t in range(6) if samples["ended"][m, t, n] and samples["mask"][m, t, n]]
            games[n] = len(ends)
            steps = range(ends[-1] + 1) if ends else ()
            paid[n] = sum(float(samples["payoff"][m, t, n]) for t in steps if samples["mask"][m, t, n])
        assert float(mean[m]) == pytest.approx(paid.sum() / games.sum())
        ratio = paid - paid.sum() / games.sum() * games
        assert error[m].numpy() == pytest.approx(ratio / games.sum(), abs=1e-6)


def test_imagined_games_begin_on_own_first_boards_with_what_is_remembered(folder, monkeypatch):
    run = load(folder)
    numbers = list(range(6))
    state, learning = adaptation(run, numbers)
    sampled = played(monkeypatch, learning.imagining.games, "sample")
    steps = play(run, state)
    learning.learn(steps)
    start = sampled[0][1]
    assert (start["clock"] == 0).all()
    for m in range(6):
        first = run.replay["board"][:, m][run.replay["clock"][:, m] == 0]
        for drawn in start["board"][m, 0, :100]:
            assert (first == drawn).all(1).any(), "of the learner's own replay"
        begins = steps["clock"][m, :, 0] == 0
        remembered = steps["history"][m, begins, 0].flatten(1)  # when each newest game began
        same = (start["history"][m, 0].flatten(1)[:, None] == remembered).all(2)
        assert same.any(1).all() and same.any(0).all() and start["history"][m].any()
    samples = run.script.imagine(learning.imagining)
    assert samples["reward"].shape[:2] == (6, 6), "whole games, beyond training's 4 steps"
    assert samples["reward"].shape[2] >= 4


def test_models_are_trusted_as_far_as_they_were_right(folder, monkeypatch):
    """Measured in stretches of the learner's own newest steps, from every 5th on"""
    run = load(folder)
    state, learning = adaptation(run, every=16)
    state.args.num_steps = 16
    measured = played(monkeypatch, run.script, "measure_horizon")
    steps = play(run, state)
    learning.remember(steps)
    (((_, parts), _),) = measured
    for name, found in parts.items():
        assert found.shape[:3] == (2, 6, 3)
        for column, start in enumerate((0, 5, 10)):
            assert torch.equal(found[:, :, column], steps[name][:, start : start + 6, 0]), name


@pytest.mark.parametrize("method", ["ppo", "hop"])
def test_without_a_world_model_real_steps_are_learned_from(method, tmp_path, monkeypatch):
    """Those of the first game, by PPO; what was learned acts in the next round"""
    hop = {"script": hopplus_mcts, "goal_dim": 2} if method == "hop" else {}
    run = load(untrained(tmp_path, method, num_seeds=2, **hop))
    state, learning = adaptation(run)
    before = weights(learning.policy)
    steps = play(run, state)
    updates = played(monkeypatch, run.script, "ppo_update")
    learning.learn(steps)
    (((_, batch), _),) = updates
    assert torch.equal(batch["action"], steps["action"].flatten(1, 2)) and batch["real"].all()
    assert equal(weights(learning.policy), learning.new_policy) and not equal(learning.new_policy, before)


def test_searching_is_left_out_unless_it_is_asked_for(trained, monkeypatch):
    folder = trained("hopplus-mcts", hopplus_mcts, num_seeds=1, num_simulations=2)
    for search in (False, True):
        run = load(folder)
        planned = played(monkeypatch, run.script, "plan_actions")
        for mode in ("frozen", "learning"):
            args = arguments(folder, search=search, repetitions=1, steps=8)
            with adapt.tqdm(disable=True) as bar:
                adapt.play_mode(args, run, [["learner", "random", "nearest_hare"]], {}, mode, bar)
        assert len(planned) == (2 * 8 if search else 0)


@pytest.mark.parametrize(
    ("method", "rate", "expected"),
    [("ppo", None, (100, 3e-4)), ("ppo", 3e-5, (100, 3e-5)), ("hopplus", None, (50, 5e-3))],
)
def test_few_real_steps_are_learned_from_slowly(method, rate, expected, trained, monkeypatch):
    seated = played(monkeypatch, adapt.frozen_players, "seat_beside")
    flags = {"every": None, "steps": 4 * expected[0], "repetitions": 1, "imagined_games": 16, "learning_rate": rate}
    adapt.main(arguments(trained(method), modes=("learning",), references=False, **flags))
    assert [(state.args.num_steps, state.args.learning_rate) for _, state in seated] == [expected]
