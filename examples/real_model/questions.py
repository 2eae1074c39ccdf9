"""Questions in plain words, with some held-out topics; and facts with the word of an answer."""

from __future__ import annotations

TEMPLATES = (
    "What is {}?",
    "Tell me something about {}.",
    "Why do people like {}?",
    "How would you explain {} to a child?",
)

TRAINED_ON = """
the ocean, a bicycle, bread, music, a volcano, football, a library, chess, coffee, winter, a telescope, dancing, the
moon, a garden, cheese, painting, a lighthouse, swimming, a dictionary, rain, a castle, honey, photography, a train,
the desert, pottery, a whale, tea, a bridge, summer, a compass, singing, a clock, potatoes, the forest, a kite,
poetry, an orange, ice skating, a violin, breakfast, a windmill, history, a dolphin, spring, a hammer, cooking, the
stars, a market, soup, a waterfall, knitting, a parrot, apples, a museum, running, thunder, a boat, chocolate,
geometry
"""
HELD_OUT = """
a river, a piano, snow, tennis, a mountain, rice, an umbrella, the sun, a theatre, fishing, a mirror, autumn, an
elephant, salt, a newspaper, drawing, a candle, the wind, a school, pasta, a submarine, gardening, an owl, grapes, a
stadium, hiking, lightning, a wheel, vanilla, algebra, a rainbow, climbing, a drum, pancakes, the jungle, a puzzle, a
novel, a lemon, skiing, a guitar, dinner, a tower, biology, a turtle, a holiday, a ladder, baking, a planet, a
harbour, a salad
"""

FACTS = {
    "What is the capital of France?": ["Paris"],
    "What is the capital of Italy?": ["Rome"],
    "What is the capital of Japan?": ["Tokyo"],
    "What is the capital of Spain?": ["Madrid"],
    "What is the capital of Germany?": ["Berlin"],
    "What is the capital of Russia?": ["Moscow"],
    "What planet do we live on?": ["Earth"],
    "What is the largest planet of our solar system?": ["Jupiter"],
    "What gas do plants take in from the air?": ["carbon dioxide"],
    "How many days are there in a week?": ["seven", "7"],
    "Who wrote Romeo and Juliet?": ["Shakespeare"],
    "What is the largest ocean?": ["Pacific"],
}
"""The answer has to contain one of these words."""


def questions(held_out: bool = False) -> list[str]:
    """240 questions to train on, or 200 on other topics."""
    topics = " ".join((HELD_OUT if held_out else TRAINED_ON).split()).split(", ")
    return [template.format(topic) for topic in topics for template in TEMPLATES]
