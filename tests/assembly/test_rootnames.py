"""What roots are called."""

from __future__ import annotations

from rankscope.tree.assembly.interning import RootDefinition, StreamRoots, name_roots


def roots(
    *named: tuple[int, str, int], inside: dict[int, tuple[int, str]] | None = None
) -> StreamRoots:
    made = tuple(RootDefinition(number=n, class_name=c, parameters=p) for n, c, p in named)
    return StreamRoots(roots=made, inside=inside or {})


def test_the_largest_root_has_the_empty_path_and_others_their_class():
    assert name_roots([roots((1, "Head", 5), (2, "Body", 50), (3, "Head", 6))]) == [
        {1: "@Head", 2: "", 3: "@Head.2"}
    ]


def test_of_equal_roots_the_first_called_is_the_largest():
    assert name_roots([roots((1, "Net", 5), (2, "Net", 5))]) == [{1: "", 2: "@Net"}]


def test_a_root_that_is_smaller_elsewhere_is_named_by_its_class_everywhere():
    teacher_and_student = roots((1, "Teacher", 90), (2, "Student", 10))
    assert name_roots([teacher_and_student, roots((1, "Student", 10))]) == [
        {1: "", 2: "@Student"},
        {1: "@Student"},
    ]


def test_numbers_of_roots_agree_over_ranks_that_call_them_in_another_order():
    first = roots((1, "Net", 90), (2, "Head", 5), (3, "Head", 6))
    second = roots((1, "Net", 90), (2, "Head", 6))
    assert name_roots([first, second]) == [{1: "", 2: "@Head", 3: "@Head.2"}, {1: "", 2: "@Head.2"}]


def test_pipeline_stages_of_different_size_are_each_their_ranks_largest_root():
    assert name_roots([roots((1, "Stage", 90)), roots((1, "Stage", 70))]) == [{1: ""}, {1: ""}]


def test_a_root_that_turns_out_to_live_inside_another_takes_its_path_there():
    named = name_roots([roots((1, "Inner", 5), (2, "Outer", 50), inside={1: (2, "blocks.0")})])
    assert named == [{2: "", 1: "blocks.0"}]


def test_roots_nested_twice_join_their_paths():
    named = name_roots(
        [roots((1, "A", 5), (2, "B", 50), (3, "C", 90), inside={1: (2, "a"), 2: (3, "b")})]
    )
    assert named == [{3: "", 1: "b.a", 2: "b"}]


def test_inside_definitions_that_go_in_a_circle_end():
    assert set(
        name_roots([roots((1, "A", 5), (2, "B", 5), inside={1: (2, "a"), 2: (1, "b")})])[0]
    ) == {1, 2}


def test_the_root_the_user_named_has_the_empty_path_whatever_its_size():
    chosen = RootDefinition(number=2, class_name="Small", parameters=5, is_preferred=True)
    other = RootDefinition(number=1, class_name="Large", parameters=50)
    assert name_roots([StreamRoots(roots=(other, chosen), inside={})]) == [{1: "@Large", 2: ""}]
