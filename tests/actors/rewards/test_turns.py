from actors.rewards.pool import MOST_SENDERS, Turns


def served(turns: Turns[str], n: int, seconds: dict[str, float]) -> list[str]:
    """The senders of the next n tasks, each charged for its time."""
    found = []
    for _ in range(n):
        sender = turns.next().rstrip("0123456789")
        turns.charge(sender, seconds[sender])
        found.append(sender)
    return found


def test_senders_share_the_time_of_the_workers_whatever_each_task_takes() -> None:
    turns: Turns[str] = Turns()
    for i in range(1000):
        turns.add("a", f"a{i}")
    for i in range(50):
        turns.add("b", f"b{i}")
        turns.add("c", f"c{i}")
    order = served(turns, 60, {"a": 10.0, "b": 1.0, "c": 1.0})
    assert order.count("a") <= 4
    assert abs(order.count("b") - order.count("c")) <= 1


def test_a_sender_that_comes_back_has_saved_no_time() -> None:
    turns: Turns[str] = Turns()
    turns.add("a", "a0")
    served(turns, 1, {"a": 100.0})
    for i in range(20):
        turns.add("b", f"b{i}")
    served(turns, 10, {"b": 10.0})
    turns.add("late", "late0")
    turns.add("late", "late1")
    assert served(turns, 3, {"b": 10.0, "late": 10.0}).count("late") <= 2
    assert len(turns) == 9


def test_tasks_of_a_sender_keep_their_order_and_one_that_is_repeated_comes_first() -> None:
    turns: Turns[str] = Turns()
    for task in ("a0", "a1", "a2"):
        turns.add("a", task)
    turns.add("a", "again", first=True)
    assert turns.drop(lambda task: task == "a1") == ["a1"]
    assert [turns.next() for _ in range(len(turns))] == ["again", "a0", "a2"]
    turns.add("a", "a3")
    turns.clear()
    assert len(turns) == 0


def test_senders_without_tasks_are_forgotten() -> None:
    turns: Turns[str] = Turns()
    for i in range(3 * MOST_SENDERS):
        turns.add(f"s{i}", f"s{i}")
        turns.charge(turns.next(), 0.001)
    turns.add("x", "x")
    assert turns.next() == "x"
    assert len(turns._used_s) <= MOST_SENDERS + 1
