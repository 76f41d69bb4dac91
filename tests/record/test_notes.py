"""A note is asked for its kind and fields; its sentence is for people, and may be reworded."""

from __future__ import annotations

import pytest

from rankscope.record.notes import Note, NoteKind, RanksNote

NOTES = {
    NoteKind.TEXT: ({"text": "no step {of} ours"}, "no step {of} ours"),
    NoteKind.NO_STEP_REACHED: (
        {"last": "step 2 (train)", "steps": "40000"},
        "no step was traced: the job ended at step 2 (train), before any of 40000",
    ),
    NoteKind.NO_STEP_BEGUN: (
        {"steps": "at:/tmp/a file"},
        "no step was traced: the job ended without a step, not one of at:/tmp/a file",
    ),
    NoteKind.UNMATCHED_GLOB: (
        {"glob": "layer.{0}.*", "near": "fc, layers.0"},
        "paths: 'layer.{0}.*' matched no module; modules here are fc, layers.0 ...",
    ),
    NoteKind.FOREIGN_PARAMETERS: (
        {"optimizer": "SGD", "own": 4, "foreign": 2, "idle": 2, "shapes": "[2, 6], [2]"},
        "SGD holds 4 parameters of the modules seen, and 2 that none of them owns "
        "(2 without a gradient; shapes [2, 6], [2])",
    ),
    NoteKind.SCALER_SKIPPED: (
        {"optimizer": "SGD"},
        "GradScaler skipped the step of SGD: inf or NaN in its gradients",
    ),
    NoteKind.OPTIMIZER_SKIPPED: (
        {"optimizer": "Adam"},
        "Adam skipped its own step: GradScaler found inf or NaN",
    ),
    NoteKind.OPTIMIZER_RAISED: (
        {"optimizer": "Fails"},
        "the step of Fails did not return: it raised",
    ),
    NoteKind.OPTIMIZER_OPTIONS: (
        {"optimizer": "AdamW", "options": "lr=0.001; betas=(0.9, 0.95)"},
        "AdamW steps with lr=0.001; betas=(0.9, 0.95)",
    ),
    NoteKind.IN_EVAL_MODE: (
        {"model": "Net", "modules": "stem, head.1"},
        "Net is stepped with stem, head.1 in eval mode",
    ),
    NoteKind.RATE_OF_ZERO: (
        {"optimizer": "AdamW", "parameters": 15},
        "AdamW steps 15 parameters with a learning rate of 0",
    ),
    NoteKind.MISSED_STEP: (
        {"why": "it had begun\nbefore"},
        "not traced on this rank: it had begun\nbefore",
    ),
    NoteKind.RUN_EAGERLY: ({}, "compiled regions run as written (compile=eager)"),
    NoteKind.REPLICAS_DIFFER: (
        {"ranks": "1,3"},
        "replicas differ: ranks 1,3 should hold the same values",
    ),
}


def test_every_kind_is_held_to_its_sentence_here():
    """Traces that were written before there were facts are read by these very words."""
    assert set(NOTES) == set(NoteKind)


@pytest.mark.parametrize("kind", NOTES)
def test_a_note_is_the_same_by_its_fact_and_by_its_sentence_alone(kind: NoteKind):
    fields, sentence = NOTES[kind]
    note = Note.of(kind, **fields)
    assert (str(note), note.fields) == (sentence, fields)
    assert Note.read(sentence) == note
    assert Note.read("reworded since", note.fact) == (
        Note.of(NoteKind.TEXT, text="reworded since") if kind is NoteKind.TEXT else note
    )


@pytest.mark.parametrize(
    "fact",
    [
        None,
        "no_step_begun",
        {},
        {"kind": "of a later version", "steps": "1"},
        {"kind": "no_step_begun"},
        {"kind": "no_step_begun", "steps": 1},
        {"kind": ["no_step_begun"], "steps": "1"},
    ],
)
def test_a_fact_that_is_not_known_here_leaves_the_sentence(fact: object):
    note = Note.read("as it was said", fact)
    assert (note.kind, str(note), note.fact) == (NoteKind.TEXT, "as it was said", None)


def test_words_that_only_resemble_a_sentence_are_words():
    for text in ("replicas differ", "no step was traced", "SGD holds 4 that none of them owns"):
        assert Note.read(text).kind is NoteKind.TEXT


def test_what_several_ranks_noted_names_them():
    note = Note.of(NoteKind.OPTIMIZER_RAISED, optimizer="Fails")
    assert str(RanksNote((0, 1, 3), note)) == (
        "ranks 0-1,3: the step of Fails did not return: it raised"
    )
