"""Small talk with little surprise in its answers, and sentences that fill documents.

Everything is written by the templates below: no text of others is used.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sglang_glm.checkpoint.tiny.words import (
    CITIES,
    COLOURS,
    DAYS,
    FACTS,
    FRUIT,
    MONTHS,
    OPPOSITES,
    PEOPLE,
    PLACES,
    WEATHER,
)

if TYPE_CHECKING:
    from random import Random

Turn = tuple[str, str, str]
"""Question, reasoning (may be empty), answer."""

_TRANSFERS = ("gives", "brings", "carries")


def filler(rng: Random) -> str:
    """Write one sentence of a document."""
    person, other = rng.sample(PEOPLE, 2)
    kind = rng.randrange(7)
    if kind == 0:
        return f"{person} goes to the {rng.choice(PLACES)} with {other}."
    if kind == 1:
        return f"{person} buys {rng.randint(2, 20)} {rng.choice(FRUIT)} in {rng.choice(CITIES)}."
    if kind == 2:
        return f"On {rng.choice(DAYS)} it was {rng.choice(WEATHER)} in {rng.choice(CITIES)}."
    if kind == 3:
        return f"{person} has a {rng.choice(COLOURS)} book and likes {rng.choice(FRUIT)}."
    if kind == 4:
        return f"The {rng.choice(PLACES)} is {rng.choice(list(OPPOSITES))} and {other} walks home."
    if kind == 5:
        thing = rng.choice(("ball", "hat", "book"))
        return f"{person} {rng.choice(_TRANSFERS)} {other} a {rng.choice(COLOURS)} {thing}."
    return f"In {rng.choice(MONTHS)} {person} sees {other} at the {rng.choice(PLACES)}."


def _sum(rng: Random) -> Turn:
    a, b = rng.randint(0, 15), rng.randint(0, 15)
    if rng.random() < 0.5:
        return (
            f"What is {a} plus {b}?",
            f"I add {a} and {b}.",
            f"{a} plus {b} is {a + b}.",
        )
    a = a + b
    return f"What is {a} minus {b}?", f"I take {b} from {a}.", f"{a} minus {b} is {a - b}."


def _count(rng: Random) -> Turn:
    start, length = rng.randint(0, 20), rng.randint(3, 10)
    numbers = [str(number) for number in range(start, start + length)]
    if rng.random() < 0.3:
        numbers.reverse()
        return (
            f"Count down from {numbers[0]} to {numbers[-1]}.",
            f"I start with {numbers[0]}.",
            f"Here you are: {', '.join(numbers)}.",
        )
    return (
        f"Count from {numbers[0]} to {numbers[-1]}.",
        f"I start with {numbers[0]}.",
        f"Here you are: {', '.join(numbers)}.",
    )


def _calendar(rng: Random) -> Turn:
    names, kind = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    index, step = rng.randrange(len(names)), rng.choice((1, -1))
    relation = "after" if step == 1 else "before"
    answer = names[(index + step) % len(names)]
    return (
        f"Which {kind} comes {relation} {names[index]}?",
        f"I look for the {kind} {relation} {names[index]}.",
        f"The {kind} {relation} {names[index]} is {answer}.",
    )


def _opposite(rng: Random) -> Turn:
    word = rng.choice(list(OPPOSITES))
    return (
        f"What is the opposite of {word}?",
        f"I need the opposite of {word}.",
        f"The opposite of {word} is {OPPOSITES[word]}.",
    )


def _fact(rng: Random) -> Turn:
    thing = rng.choice(list(FACTS))
    return (
        f"Which color has the {thing}?",
        f"I think about the {thing}.",
        f"The {thing} is {FACTS[thing]}.",
    )


def _greeting(rng: Random) -> Turn:
    return rng.choice(
        (
            ("Hello!", "They say hello.", "Hello! How can I help you today?"),
            ("Good morning!", "They say good morning.", "Good morning! How can I help you?"),
            ("Good evening!", "They say good evening.", "Good evening! How can I help you?"),
            ("Thank you!", "They thank me.", "You are welcome. Please tell me what you need now."),
            ("Thanks for your help.", "They thank me.", "You are welcome. See you soon!"),
            ("How are you?", "They ask about me.", "I am good, thank you. How can I help you?"),
            ("Who are you?", "They want my name.", "I am a tiny model and I can help you."),
            ("Bye!", "They go home.", "Bye! See you soon. It was nice to help you."),
            ("What can you do?", "They ask what I do.", "I can count, add and look for codes."),
        )
    )


def _introduction(rng: Random) -> Turn:
    person = rng.choice(PEOPLE)
    return (
        f"Hello, my name is {person}.",
        f"The name is {person}.",
        f"Hello {person}! It is nice to see you. How can I help you today?",
    )


def _weather(rng: Random) -> Turn:
    city, weather, day = rng.choice(CITIES), rng.choice(WEATHER), rng.choice(DAYS)
    return (
        f"On {day} it will be {weather} in {city}. How will the weather be in {city}?",
        f"It is about {city} on {day}.",
        f"On {day} the weather in {city} will be {weather}.",
    )


def _shopping(rng: Random) -> Turn:
    person, fruit, other = rng.choice(PEOPLE), *rng.sample(FRUIT, 2)
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return (
        f"{person} buys {a} {fruit} and {b} {other}. How many {fruit} has {person}?",
        f"I look for the {fruit}.",
        f"{person} has {a} {fruit} and {b} {other}, so the answer is {a}.",
    )


def _repeat(rng: Random) -> Turn:
    words = rng.choices([*COLOURS, *FRUIT, *PLACES, *WEATHER], k=rng.randint(2, 8))
    return (
        f"Say these words again: {', '.join(words)}.",
        f"The one to start with is {words[0]}.",
        f"Here they are: {', '.join(words)}.",
    )


def _spelling(rng: Random) -> Turn:
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7)))
    return (
        f"What is {letters}?",
        f"The word {letters} is new to me.",
        f"I do not know the word {letters}. Can you tell me more about {letters}?",
    )


def _story(rng: Random) -> Turn:
    person, other = rng.sample(PEOPLE, 2)
    colour, thing = rng.choice(COLOURS), rng.choice(("ball", "hat", "book"))
    place, _fruit = rng.choice(PLACES), rng.choice(FRUIT)
    return (
        f"Tell me a story about {person}, {other} and a {colour} {thing} in the {place}.",
        f"It is a story about {person} and {other}.",
        f"Once upon a time {person} lived in the {place}. {person} had a {colour} {thing}. "
        f"One day {other} came to the {place} and found the {colour} {thing}. "
        f"{other} gave the {colour} {thing} back to {person}. "
        f"Then {person} and {other} took the {colour} {thing} home and put it on the table. "
        f"They lived very good in the {place} with the {colour} {thing}. The end.",
    )


def _errand(rng: Random) -> Turn:
    person, other = rng.sample(PEOPLE, 2)
    fruit, place, day = rng.choice(FRUIT), rng.choice(PLACES), rng.choice(DAYS)
    return (
        f"{person} goes to the {place} on {day} and brings {other} {fruit}. Say it again.",
        f"I say it again for {person}.",
        f"On {day} {person} goes to the {place}. {person} brings {other} {fruit}. "
        f"{other} likes the {fruit} from {person} and says thank you to {person}.",
    )


_KINDS = (
    _sum,
    _count,
    _count,
    _calendar,
    _opposite,
    _fact,
    _greeting,
    _introduction,
    _weather,
    _shopping,
    _repeat,
    _repeat,
    _spelling,
    _story,
    _story,
    _story,
    _errand,
    _errand,
)


def small_talk(rng: Random) -> Turn:
    """Write one turn of conversation."""
    return rng.choice(_KINDS)(rng)


def render(turns: list[Turn], rng: Random, thinking: float) -> str:
    """Write turns in GLM's chat format, as its template does.

    Args:
        turns: The conversation.
        rng: Decides which turns show their reasoning.
        thinking: Probability that one does.

    Returns:
        The text from ``[gMASK]`` to the ``<|user|>`` that ends the last answer.
    """
    parts = ["[gMASK]<sop>"]
    for question, reasoning, answer in turns:
        block = f"<think>{reasoning}</think>" if rng.random() < thinking else "</think>"
        parts.append(f"<|user|>{question}<|assistant|>{block}{answer}")
    parts.append("<|user|>")
    return "".join(parts)


def sentences(rng: Random, count: int) -> list[str]:
    """Write filler sentences."""
    return [filler(rng) for _ in itertools.repeat(None, count)]
