# ruff: noqa: SIM905 - lists of words read better as text
"""The words that the tiny model knows; each is one token.

The four lists of retrieval are disjoint from each other and from the words of conversation, so that
a name or a code never occurs in filler text.
"""

from __future__ import annotations

NAME_FIRST = (
    "amber brave calm dusky eager faint gentle humble icy jolly keen lively mild noble odd proud "
    "quiet rare shy sly upper vast wise zesty bold clever dainty earnest frank grand hollow jade"
).split()
NAME_SECOND = (
    "fox wolf bear otter hawk crane mouse badger tiger lion whale seal goat sheep camel zebra "
    "raven swan lizard frog toad snake shark crab moth beetle ant owl deer elk hare mole"
).split()
CODE_FIRST = (
    "scarlet azure olive ebony pearl ashen pink brown golden silver copper iron steel glass paper "
    "wooden stone velvet cotton silk linen plastic rubber marble ivory coral cedar maple walnut "
    "bamboo crystal clay"
).split()
CODE_SECOND = (
    "lamp chair stool clock spoon knife plate bottle basket ladder hammer anchor bell drum flute "
    "piano violin mirror pillow blanket candle lantern kettle bucket broom brush rope chain wheel "
    "engine rocket compass"
).split()

PEOPLE = "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo".split()
PLACES = "park market school river garden kitchen library station forest beach".split()
FRUIT = "apples pears plums lemons peaches cherries grapes melons".split()
COLOURS = "red blue green yellow black white".split()
WEATHER = "sunny rainy windy cloudy snowy foggy".split()
CITIES = "Paris London Rome Berlin Madrid Lisbon Vienna Oslo".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
OPPOSITES = {
    "big": "small",
    "hot": "cold",
    "fast": "slow",
    "open": "closed",
    "full": "empty",
    "light": "heavy",
    "high": "low",
    "new": "old",
    "wet": "dry",
    "loud": "silent",
    "hard": "soft",
    "long": "short",
}
FACTS = {
    "sky": "blue",
    "grass": "green",
    "snow": "white",
    "night": "black",
    "sun": "yellow",
    "rose": "red",
}
NUMBERS = tuple(str(number) for number in range(31))

_PLAIN = (
    "the a an of is are was and in at to with from it you I he she we they has have had goes went "
    "buys bought sees saw likes eats plays reads walks code what who where how many which name day "
    "month comes after before plus minus opposite not know do does did can help today tomorrow "
    "weather will be thank thanks hello good morning evening please tell me about say word words "
    "again count up down there that this so my your one two then now here ball book hat dog cat "
    "bread milk tea friend house again yes no sure think need look for found question answer "
    "number color carries brings home every because nice welcome bye see soon notes remember "
    "repeat add get left gives gave more all story short once upon time lived very end them "
    "their her his back took put on table tiny came these says start am take codes model ask want go"
).split()
_INITIAL = (
    "The A What Who Where How Which Hello Good Thank Thanks Please Tell Say Count It I He She We "
    "They Yes No Sure You There This After Before Today Tomorrow Here Once Then Remember Noted "
    "Repeat In On My One Bye See Now Can"
).split()


def vocabulary() -> list[str]:
    """List the pieces of the tokenizer that are whole words.

    Returns:
        Each once, in a fixed order; ``" word"`` inside a sentence, ``"Word"`` at its start.
    """
    inner = [
        *NAME_FIRST,
        *NAME_SECOND,
        *CODE_FIRST,
        *CODE_SECOND,
        *PEOPLE,
        *PLACES,
        *FRUIT,
        *COLOURS,
        *WEATHER,
        *CITIES,
        *DAYS,
        *MONTHS,
        *OPPOSITES,
        *OPPOSITES.values(),
        *FACTS,
        *NUMBERS,
        *_PLAIN,
    ]
    initial = [*_INITIAL, *PEOPLE, *DAYS, *MONTHS, *NUMBERS[10:]]
    later = [f" {word}" for word in (*inner, *_INITIAL)]
    return list(dict.fromkeys(later + initial))
