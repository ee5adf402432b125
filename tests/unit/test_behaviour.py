"""The parts of the behaviour evaluation that need no server."""

from __future__ import annotations

import pytest

from sglang_glm.checkpoint.tiny.notes import write_crowded_notes, write_notes
from sglang_glm.checkpoint.tiny.tokenizer import build_tokenizer
from sglang_glm.verification.behaviour.retrieval import choose_questions
from sglang_glm.verification.behaviour.run import behaviour_options
from sglang_glm.verification.behaviour.talk import accepted, write_conversations


def test_notes_have_the_length_asked_for_and_answers_that_stand_in_them() -> None:
    tokenizer = build_tokenizer()
    notes = write_notes(tokenizer, 2048, seed=3)
    assert 2048 <= len(tokenizer.encode(notes.text).ids) < 2048 + 32
    assert len(notes.questions) > 30
    for question in notes.questions:
        name = question.text.partition(" code of ")[2].partition("?")[0]
        stated = [line for line in notes.text.splitlines() if f"code of {name} is" in line]
        assert len(stated) == question.statements
        assert stated[-1] == f"The code of {name} is {question.code}."
        assert question.is_answered_by(stated[-1])
        assert not question.is_answered_by("The code of brave owl is golden drum, I think.")
        if question.positional and stated[0] != stated[-1]:
            assert not question.is_answered_by(stated[0])
    depths = [question.depth for question in notes.questions]
    assert min(depths) < 0.25 and max(depths) > 0.75


def test_crowded_notes_state_few_names_more_often_than_can_be_selected() -> None:
    tokenizer = build_tokenizer()
    branches = write_crowded_notes(tokenizer, 4096, seed=5, branches=3, names=2)
    trunk = branches[0].text[: branches[0].text.index("Noted.")]
    assert 4096 - 48 < len(tokenizer.encode(trunk).ids) < 4096 + 16
    assert len({notes.text for notes in branches}) == 3
    for notes in branches:
        assert notes.text.startswith(trunk)
        assert len(notes.questions) == 2
        for question in notes.questions:
            name = question.text.partition(" code of ")[2].partition("?")[0]
            stated = [line for line in notes.text.splitlines() if f"code of {name} is" in line]
            assert stated[-1] == f"The code of {name} is {question.code}."
            assert len(stated) == question.statements > 2 * 64


def test_half_of_the_questions_are_positional() -> None:
    notes = write_notes(build_tokenizer(), 2048, seed=4)
    chosen = choose_questions(notes, 20)
    assert len(set(chosen)) == 20
    positional = sum(notes.questions[i].positional for i in chosen)
    assert positional == min(10, sum(question.positional for question in notes.questions))


def test_the_same_seed_writes_the_same_text() -> None:
    tokenizer = build_tokenizer()
    assert write_notes(tokenizer, 500, seed=1) == write_notes(tokenizer, 500, seed=1)
    assert write_notes(tokenizer, 500, seed=1) != write_notes(tokenizer, 500, seed=2)
    assert write_conversations(3, 1) == write_conversations(3, 1)


def test_conversations_end_where_the_reply_begins() -> None:
    for conversation in write_conversations(20, 2):
        assert conversation.prompt.endswith("<|assistant|></think>")
        assert conversation.reply not in ("", conversation.prompt)


def test_accept_length_counts_the_sampled_token() -> None:
    infos = [
        {"spec_correct_drafts_histogram": [1, 0, 2]},
        {"spec_correct_drafts_histogram": [0, 1]},
        {},
    ]
    length, positions, rounds = accepted(infos)
    assert rounds == 4
    assert length == pytest.approx((1 + 3 + 3 + 2) / 4)
    assert positions == pytest.approx((3 / 4, 2 / 4))
    assert accepted([{}]) == (0.0, (), 0)


def test_unknown_options_are_refused() -> None:
    assert behaviour_options(questions=5).questions == 5
    with pytest.raises(ValueError, match="got 'question'"):
        behaviour_options(question=5)
