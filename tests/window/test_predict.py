"""Which update will be saved: call sequences of training loops."""

from __future__ import annotations

import logging

import pytest

from gockpt_jax.window.predict import SavePredictor

HORIZON = 4


def every(interval):
    return lambda label: label % interval == 0


def loop(predictor, labels, saves, *, first_version=0):
    """A loop: before each update a prediction, after it `save` with a label (None: no call).

    Returns what was predicted before each update.
    """
    predicted = []
    for version, label in enumerate(labels, start=first_version + 1):
        predicted.append(predictor.next_save(version - 1, HORIZON))
        if label is not None:
            predictor.observe(version, label, saves(label))
    return predicted


@pytest.mark.parametrize("offset", [0, 1, 100])
def test_policy_with_consecutive_labels(offset):
    """From the third update on every save is seen at most HORIZON updates ahead, and no other."""
    policy, labels = every(5), range(offset, offset + 23)
    predicted = loop(SavePredictor(policy), labels, policy)
    saved = [version for version, label in enumerate(labels, start=1) if policy(label)]
    assert predicted[:2] == [None, None]
    for version, target in enumerate(predicted[2:], start=2):
        ahead = [v for v in saved if version < v <= version + HORIZON]
        if version + HORIZON <= 23:
            assert target == (ahead[0] if ahead else None)


def test_a_label_before_the_update_it_names():
    """A loop that starts at label 1000 after a restore: versions start at 0."""
    predicted = loop(SavePredictor(every(10)), range(1000, 1012), every(10))
    assert predicted[:2] == [None, None]
    assert predicted[7:11] == [11, 11, 11, 11]


def test_gated_saves_by_their_period():
    """A loop that calls `save` only where it saves, so that the policy says yes to every label."""
    labels = [n if n % 5 == 0 else None for n in range(1, 24)]
    predicted = loop(SavePredictor(every(1)), labels, lambda _: True)
    assert predicted[:11] == [None] * 11
    assert predicted[11:15] == [15] * 4
    assert predicted[15:20] == [None, *[20] * 4]


def test_policy_without_foresight_goes_by_the_period_too():
    predicted = loop(SavePredictor(None), range(1, 24), every(5))
    assert predicted[:11] == [None] * 11
    assert predicted[11:15] == [15] * 4


def test_changed_period_is_followed_after_two_saves():
    labels = [n if n in (3, 6, 13, 20) else None for n in range(1, 30)]
    predicted = loop(SavePredictor(None), labels, lambda _: True)
    assert predicted[6:9] == [9, 9, 9]
    assert predicted[9:16] == [None] * 7  # the 9th did not come
    assert predicted[16:20] == [20] * 4
    assert predicted[23:27] == [27] * 4


def test_interval_of_one():
    """Every label is saved: the next one is always predicted."""
    predicted = loop(SavePredictor(every(1)), range(6), every(1))
    assert predicted == [None, None, 3, 4, 5, 6]


def test_expected_save_comes_first_and_once():
    predictor = SavePredictor(every(100))
    loop(predictor, range(4), every(100))
    predictor.expect(7)
    assert [predictor.next_save(v, HORIZON) for v in (4, 5, 6)] == [7, 7, 7]
    assert predictor.next_save(7, HORIZON) is None
    predictor.expect(30)
    assert predictor.next_save(20, HORIZON) is None  # not yet within the horizon
    assert predictor.next_save(26, HORIZON) == 30


class TestExpectedLater:
    """A save far ahead is announced: what else comes until then?"""

    def test_the_policy_s_saves_of_a_loop_that_calls_at_every_label(self):
        predictor = SavePredictor(every(5))
        loop(predictor, range(1, 4), every(5))
        predictor.expect(18)
        found = loop(predictor, range(4, 21), every(5), first_version=3)
        assert found == [5, 5, None, *[10] * 4, None, *[15] * 4, *[18] * 3, 20, 20]

    @pytest.mark.parametrize("updates", [1, 2])
    def test_of_one_that_asks_at_every_label_too(self, updates):
        predictor = SavePredictor(every(5))
        for label in range(1, 4):
            predictor.asked(updates * label, label, False)
        predictor.expect(100)
        first = updates * 3
        assert predictor.next_save(first, 2 * updates) == updates * 5
        assert predictor.next_save(first + updates - 1, 2 * updates) == updates * 5
        assert predictor.next_save(first + updates, 2 * updates) is None  # it asks no more

    def test_none_where_it_calls_no_more(self):
        predictor = SavePredictor(every(5))
        loop(predictor, range(1, 4), every(5))
        predictor.expect(18)
        assert [predictor.next_save(v, HORIZON) for v in (3, 4, 8, 14)] == [5, None, None, 18]

    def test_none_where_all_calls_are_saves(self):
        """Two saves in a row, each announced: nothing tells that other labels will be called at."""
        predictor = SavePredictor(every(3))
        for version in (6, 7):
            predictor.expect(version)
            predictor.observe(version, version, True)
        predictor.expect(18)
        assert [predictor.next_save(v, HORIZON) for v in (7, 8, 14)] == [None, None, 18]

        predictor = SavePredictor(every(3))
        for version in (1, 6, 7):  # nor that one was refused long ago
            predictor.observe(version, version, version > 1)
        predictor.expect(18)
        assert [predictor.next_save(v, HORIZON) for v in (7, 8, 14)] == [None, None, 18]

    def test_the_policy_s_next_where_the_last_call_was_a_save(self):
        predictor = SavePredictor(every(3))
        loop(predictor, range(1, 4), every(3))
        predictor.expect(18)
        assert predictor.next_save(3, HORIZON) == 6

    def test_none_where_refused_calls_are_unheard(self):
        predictor = SavePredictor(every(3))
        predictor.sees_every_call = False
        for version in (6, 7):
            predictor.observe(version, version, True)
        predictor.expect(18)
        assert [predictor.next_save(v, HORIZON) for v in (7, 8, 14)] == [None, None, 18]

    def test_none_by_their_period(self):
        predictor = SavePredictor()
        predictor.observe(5, 5, True)
        predictor.observe(10, 10, True)
        predictor.expect(18)
        assert [predictor.next_save(v, HORIZON) for v in (11, 13, 14, 17)] == [None, None, 18, 18]
        predictor.observe(18, 18, True)
        assert predictor.next_save(23, HORIZON) == 26

    def test_what_is_near_is_the_nearest_of_both(self):
        predictor = SavePredictor(every(5))
        loop(predictor, range(1, 4), every(5))
        predictor.expect(4)
        assert predictor.next_save(3, HORIZON) == 4
        predictor.expect(6)
        assert predictor.next_save(3, HORIZON) == 5

    def test_of_several_processes_all_have_seen_the_calls(self):
        """And not what one has asked."""
        predictor = SavePredictor(every(5))
        predictor.is_alone, predictor.agreed = False, 1
        for label in range(1, 4):
            predictor.asked(label, label, False)
        predictor.expect(18)
        assert predictor.next_save(3, HORIZON) is None
        loop(predictor, range(1, 4), every(5))
        predictor.expect(18)
        assert predictor.next_save(3, HORIZON) == 5


def test_labels_that_jump_are_not_counted_on():
    """Labels in tokens, or a step that is not saved every time: no policy, no wrong window."""
    predicted = loop(SavePredictor(every(512)), range(0, 512 * 12, 128), every(512))
    # By the period of the accepted saves instead: every fourth update.
    assert predicted[:5] == [None] * 5
    assert predicted[5:9] == [9] * 4


def test_one_jump_is_forgotten_after_two_consecutive_labels():
    predictor = SavePredictor(every(10))
    loop(predictor, range(3, 7), every(10))
    assert predictor.next_save(4, HORIZON) == 8
    predictor.observe(5, 107, False)
    assert predictor.next_save(5, HORIZON) is None
    predictor.observe(6, 108, False)
    assert predictor.next_save(6, HORIZON) == 8


@pytest.mark.parametrize(("again", "target"), [(105, None), (106, 9)])
def test_save_called_twice_at_one_version(again, target):
    """A forced save beside the regular one tells nothing about the labels of other updates."""
    predictor = SavePredictor(every(10))
    loop(predictor, range(101, 106), every(10))
    predictor.observe(5, again, True)
    assert predictor.next_save(5, HORIZON) == target
    predictor.observe(5, again, True)
    loop(predictor, range(106, 108), every(10), first_version=5)
    assert predictor.next_save(7, HORIZON) == 10


def test_the_period_of_the_past_is_not_asked_where_a_policy_knows():
    def policy(label):
        return label in (5, 10)

    assert loop(SavePredictor(policy), range(1, 16), policy)[10:] == [None] * 5
    predictor = SavePredictor()
    predictor.observe(5, 5, True)
    predictor.observe(10, 10, True)
    assert predictor.next_save(12, HORIZON) == 15
    predictor.is_started = True
    predictor.expect(13)
    assert [predictor.next_save(v, HORIZON) for v in (12, 13)] == [13, None]


def test_period_counts_versions_not_calls():
    predictor = SavePredictor(None)
    for version in (5, 5, 10, 10):
        predictor.observe(version, version, True)
    assert predictor.next_save(11, HORIZON) == 15


def test_no_update_is_predicted_before_the_first_save():
    assert SavePredictor(every(1)).next_save(0, HORIZON) is None


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_labels_that_stand_for_several_updates(updates):
    """Gradients are accumulated: `save` comes with every label, and with every second update."""
    labels = [n // updates if n % updates == 0 else None for n in range(1, 12 * updates)]
    predicted = loop(SavePredictor(every(4)), labels, every(4))
    first = 4 * updates
    ahead = min(HORIZON, first - 2 * updates)  # two calls have to come before
    assert predicted[: first - ahead] == [None] * (first - ahead)
    assert predicted[first - ahead : first] == [first] * ahead
    assert predicted[2 * first - HORIZON : 2 * first] == [2 * first] * HORIZON


@pytest.mark.parametrize(("updates", "labels"), [(1, range(1001, 1005)), (2, range(501, 503))])
def test_policies_are_asked_for_few_labels_however_long_ago_the_last_call_was(updates, labels):
    asked = []
    predictor = SavePredictor(lambda label: bool(asked.append(label)))
    for label in range(1, 4):
        predictor.observe(updates * label, label, False)
    assert predictor.next_save(1000, HORIZON) is None
    assert asked == list(labels)


def test_the_last_accepted_save_counts():
    predictor = SavePredictor()
    assert not predictor.has_saved_since(0)
    predictor.observe(5, 5, True)
    predictor.observe(7, 7, False)
    assert [predictor.has_saved_since(version) for version in (4, 5, 6)] == [True, True, False]


@pytest.mark.parametrize(
    ("saves", "asks", "updates"), [(2, 3, 2), (3, 2, 2), (None, 2, 2), (2, None, 2)]
)
def test_the_loop_is_back_at_the_next_call_or_question(saves, asks, updates):
    """Where one stands for as many updates as a label."""
    predictor = SavePredictor()
    assert predictor.updates_between_calls is None
    for label in (1, 2):
        if asks:
            predictor.asked(asks * label, label, False)
        if saves:
            predictor.observe(saves * label, label, False)
    assert predictor.updates_between_calls == updates
    for version in (20, 21):
        predictor.observe(version, 128 * version, False)
    assert predictor.updates_between_calls == 1  # whatever labels count


def test_questions_of_a_loop_that_saves_otherwise_tell_nothing_of_its_calls():
    predictor = SavePredictor()
    for version in (1, 2):
        predictor.asked(version, version, True)
    assert predictor.updates_between_calls is None


@pytest.mark.parametrize(
    ("calls", "target"),
    [
        ([(10, 110), (20, 120)], 23),
        ([(10, 110)], None),  # alone it tells nothing
        ([(10, 105), (20, 120)], 30),  # by their period
    ],
)
def test_calls_that_the_policy_refused_may_be_unheard(calls, target):
    """With a stock manager: accepted saves as far apart in labels as in updates tie both."""
    predictor = SavePredictor(lambda label: label in (111, 123))
    predictor.sees_every_call = False
    for version, label in calls:
        predictor.observe(version, label, True)
    version, _ = calls[-1]
    assert predictor.next_save(version + (target == 30) * 6, HORIZON) == target


class TestQuestions:
    """Loops that ask first, and call `save` where the answer is yes."""

    def loop(self, predictor, labels, policy, *, saves=lambda label: True, offset=0, times=1):
        predicted = []
        for version, label in enumerate(labels, start=1):
            predicted.append(predictor.next_save(version - 1, HORIZON))
            answer = policy(label + offset)
            for _ in range(times):
                predictor.asked(version, label + offset, answer)
            if answer and saves(label):
                predictor.observe(version, label, True)
        return predicted

    @pytest.mark.parametrize(("first", "times"), [(1, 1), (1000, 1), (1000, 2)])
    def test_their_policy_is_theirs(self, first, times):
        policy, labels = every(5), range(first, first + 13)
        predicted = self.loop(SavePredictor(policy), labels, policy, times=times)
        saved = [version for version, label in enumerate(labels, start=1) if policy(label)]
        for version, target in enumerate(predicted[2:], start=2):
            ahead = [v for v in saved if version < v <= version + HORIZON]
            if version + HORIZON <= 13:
                assert target == (ahead[0] if ahead else None)

    @pytest.mark.parametrize("updates", [1, 2])
    def test_a_last_save_that_is_forced_ties_the_labels_too(self, updates):
        predictor = SavePredictor(every(5))
        for label in range(1, 7):
            predictor.asked(updates * label, label, label == 5)
            if label == 5:
                predictor.observe(updates * label, label, True)
        predictor.observe(updates * 7, 7, True)  # not asked for
        assert predictor.next_save(updates * 10 - 3, HORIZON) == updates * 10

    def test_the_first_question_ties_none_yet(self):
        predictor = SavePredictor(every(5))
        predictor.asked(6, 6, False)
        predictor.observe(7, 7, True)
        predictor.asked(8, 8, False)
        predictor.asked(9, 9, False)
        assert predictor.next_save(9, HORIZON) == 10

    def test_of_several_processes_one_may_have_asked_alone(self):
        predictor = SavePredictor(every(5))
        predictor.is_alone = False
        assert self.loop(predictor, range(1, 6), every(5)) == [None] * 5

    def test_of_several_processes_all_may_have_asked(self):
        """What they agree on at a save holds until the next one, whatever one asks alone."""
        predictor = SavePredictor(lambda label: label in (105, 109))
        predictor.is_alone = False
        self.loop(predictor, range(101, 106), predictor.is_save_label)
        assert predictor.found_by_asking(5, 105) == 1
        assert [predictor.found_by_asking(*at) for at in ((5, 104), (6, 105))] == [None, None]
        assert predictor.next_save(5, HORIZON) is None
        predictor.agreed = 1
        predictor.asked(6, 300, False)
        assert predictor.next_save(6, HORIZON) == 9
        predictor.asked(9, 109, True)
        assert predictor.found_by_asking(9, 109) is None

    def test_what_is_found_by_asking(self):
        """Updates per label; nothing once it did not save what it asked for."""
        predictor = SavePredictor(every(5))
        for label in range(1, 6):
            predictor.asked(2 * label, label, label == 5)
        predictor.observe(10, 5, True)
        assert predictor.found_by_asking(10, 5) == 2
        for label in (6, 7):
            predictor.asked(2 * label, label, True)
        assert predictor.found_by_asking(14, 7) is None

    def test_what_they_tie_is_foreseen_at_once(self):
        """And no longer what the period of the last saves had told."""
        predictor = SavePredictor(lambda label: label in (5, 10, 13))
        predictor.observe(5, 5, True)
        predictor.observe(10, 10, True)
        assert predictor.next_save(11, HORIZON) == 15
        predictor.asked(11, 11, False)
        predictor.asked(12, 12, False)
        assert predictor.next_save(12, HORIZON) == 13

    def test_another_label_than_asked_for_is_no_tie(self):
        """It asks for the next label, while the last save tells that labels are another's."""
        predictor = SavePredictor(every(5))
        predicted = self.loop(predictor, range(1, 24), every(5), offset=1)
        assert predicted[4:9] == [None] * 5
        assert predicted[9:14] == [None, *[14] * 4]  # by the period of the saves at 4 and 9

    @pytest.mark.parametrize(("rest", "foreseen"), [(0, 21), (1, 15)])
    def test_a_rule_of_its_own_besides_is_no_tie(self, rest, foreseen):
        predictor = SavePredictor(every(1))
        predicted = self.loop(
            predictor, range(1, 24), every(1), saves=lambda label: label % 7 == rest
        )
        assert predicted[3 : foreseen - HORIZON] == [None] * (foreseen - HORIZON - 3)
        # By the period of the two saves before.
        assert predicted[foreseen - HORIZON : foreseen] == [foreseen] * HORIZON

    def test_calls_know_better(self):
        predictor = SavePredictor(every(5))
        for version in range(1, 8):
            predictor.asked(version, version + 1, False)
            predictor.observe(version, version, False)
        assert predictor.next_save(7, HORIZON) == 10


class TestAbandoned:
    """Windows that were opened in vain."""

    def predictor(self):
        predictor = SavePredictor(every(5))
        loop(predictor, range(1, 4), every(5))
        return predictor

    def test_one_is_forgiven(self, caplog):
        predictor = self.predictor()
        predictor.abandoned()
        assert predictor.next_save(3, HORIZON) == 5
        assert caplog.records == []

    def test_two_in_a_row_end_predictions_with_one_warning(self, caplog):
        predictor = self.predictor()
        with caplog.at_level(logging.WARNING, logger="gockpt_jax"):
            for _ in range(2):
                assert predictor.next_save(3, HORIZON) == 5
                predictor.abandoned()
            assert predictor.next_save(3, HORIZON) is None
            predictor.abandoned()
        (record,) = caplog.records
        assert "expect_save(in_steps=n)" in record.getMessage()

    def test_they_go_on_once_a_save_has_come(self):
        predictor = self.predictor()
        predictor.abandoned()
        predictor.abandoned()
        predictor.observe(4, 4, True)
        assert predictor.next_save(4, HORIZON) == 5
        predictor.abandoned()  # and one is forgiven again
        assert predictor.next_save(6, HORIZON) == 10

    def test_until_then_what_is_announced_is_all_that_comes(self):
        predictor = self.predictor()
        predictor.abandoned()
        predictor.abandoned()
        predictor.expect(6)
        assert [predictor.next_save(v, HORIZON) for v in (3, 5, 6)] == [6, 6, None]
        predictor.expect(10)
        assert predictor.next_save(6, HORIZON) == 10

    def test_a_save_between_forgives(self):
        predictor = self.predictor()
        predictor.abandoned()
        predictor.observe(4, 4, True)
        predictor.abandoned()
        assert predictor.next_save(4, HORIZON) == 5


def test_policy_is_asked_once_per_prediction_not_per_step():
    asked = []

    def policy(label):
        asked.append(label)
        return label % 50 == 0

    predictor = SavePredictor(policy)
    loop(predictor, range(1, 3), lambda _: False)
    asked.clear()
    for _ in range(5):
        predictor.next_save(2, HORIZON)
    assert len(asked) == HORIZON


def test_nothing_is_predicted_where_others_take_the_state():
    predictor = SavePredictor(every(2))
    loop(predictor, range(7), every(2))
    assert predictor.next_save(7, HORIZON) is not None
    predictor.takes_state = False
    assert predictor.next_save(7, HORIZON) is None


class TestWhyUnforeseen:
    """What a save is told that nothing has predicted."""

    def test_the_first_ones_of_a_loop_that_decides_itself(self):
        predictor = SavePredictor(every(1))
        assert ": it is the first of this run; " in predictor.why_unforeseen(9)
        loop(predictor, [None] * 4 + [5], lambda _: True)
        told = predictor.why_unforeseen(9)
        assert ": it is the second, and their period is not known yet; " in told
        loop(predictor, [None] * 4 + [10], lambda _: True, first_version=5)
        told = predictor.why_unforeseen(9)
        assert "no window was open; `manager.expect_save(in_steps=n)`" in told

    def test_a_policy_that_is_asked_at_each_step_needs_no_period(self):
        predictor = SavePredictor(every(5))
        loop(predictor, range(1, 7), every(5))
        told = predictor.why_unforeseen(9)
        assert "no window was open; `manager.expect_save(in_steps=n)`" in told

    def test_the_one_behind_a_restore(self):
        predictor = SavePredictor(None)
        predictor.state_replaced()
        assert "it is the first of this run" in predictor.why_unforeseen(9)  # that says more
        loop(predictor, range(1, 11), every(5))
        assert "restored" not in predictor.why_unforeseen(9)
        predictor.state_replaced()
        loop(predictor, [6, 7], lambda _: False, first_version=10)
        assert ": a checkpoint was restored since the last one; " in predictor.why_unforeseen(9)

    def test_windows_that_were_opened_in_vain(self):
        predictor = SavePredictor(None)
        loop(predictor, range(1, 11), every(5))
        predictor.abandoned()
        predictor.abandoned()
        told = predictor.why_unforeseen(9)
        assert ": windows had been opened for saves that did not come; " in told

    @pytest.mark.parametrize(
        ("version", "words"), [(8, "1 step before"), (10, "3 steps before"), (4, "3 steps after")]
    )
    def test_one_announced_for_another_step(self, version, words):
        predictor = SavePredictor(None)
        predictor.expect(7)
        told = predictor.why_unforeseen(version)
        assert f": one was announced for {words} it; `expect_save(in_steps=n)` counts" in told
        assert "it is the first" in predictor.why_unforeseen(7)
        predictor.observe(8, 8, True)
        assert "announced for" not in predictor.why_unforeseen(9)  # that was the save before
        predictor.expect(12)
        predictor.state_replaced()
        assert "restored" in predictor.why_unforeseen(13)
