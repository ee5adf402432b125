# ruff: noqa: RUF001
"""The text on which the small tokenizer is trained: prose, Chinese, code, JSON and numbers."""

CORPUS = """\
A language model reads a sequence of tokens and predicts the next one. The sequence may be short,
a question of a dozen words, or long: a whole repository, a day of conversation, a book. Reading a
long sequence is expensive because every new token may need to look at every token before it.
Sparse attention answers this with a small index. For each token the index keeps one short key, and
for each query it scores all keys, takes the best few thousand positions and lets the real attention
look at those alone. When the context is shorter than the number of positions kept, nothing is lost
and the result equals that of dense attention. When it is longer, the choice of positions decides
what the model can see, so the index must be computed exactly as it was trained.

The weather in Paris is mild today, with light rain in the morning and some sun after noon. In
Beijing it is dry and cold; the wind comes from the north. Tomorrow will be warmer. Should I take an
umbrella? Yes, if you leave before ten o'clock. The train to London takes about two hours and
twenty minutes, and the first one leaves at seven. Please tell me which platform it leaves from.

To make bread, mix five hundred grams of flour with three hundred and fifty grams of water, a little
yeast and ten grams of salt. Let the dough rest, fold it four times, and wait until it has doubled.
Heat the oven, shape the loaf, and bake it for forty minutes until the crust is dark. Let it cool
before you cut it; the inside is still cooking while it rests.

She opened the window and listened. Somewhere below, a dog was barking at a passing cart, and the
baker across the street was pulling up his shutters. It was early, but the square was already full
of people, and their voices came up to her like the sound of water over stones. He had promised to
write as soon as he arrived, and now there was a letter on the table with her name on it.

The square of the hypotenuse is the sum of the squares of the other two sides. If a equals three and
b equals four, then c equals five. The first ten primes are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29;
their sum is 129. One kilometre is 1000 metres, one hour is 3600 seconds, and 0.1 + 0.2 is not 0.3.
Let me think about this step by step. First, find what is known. Second, write the equation. Third,
solve it, and check the answer against the question. Therefore the answer is 42.

语言模型读取一串词元，并预测下一个词元。上下文很长的时候，每个新词元都要查看之前的所有词元，代价很高。
稀疏注意力先用一个小的索引给所有位置打分，只保留分数最高的位置，然后只对这些位置做真正的注意力计算。
今天天气很好，我们去公园散步吧。请问从北京到上海的火车几点出发？谢谢，不客气。

def top_positions(scores, count):
    \"\"\"Return the positions of the highest scores; ties go to the lower position.\"\"\"
    order = sorted(range(len(scores)), key=lambda position: (-scores[position], position))
    return order[:count]

class Cache:
    def __init__(self, page_size=64):
        self.page_size = page_size
        self.pages = []

    def append(self, key, value):
        if not self.pages or len(self.pages[-1]) == self.page_size:
            self.pages.append([])
        self.pages[-1].append((key, value))

for i in range(10):
    if i % 2 == 0:
        print(i, end=", ")
    else:
        continue
return None

{"name": "get_weather", "description": "Weather of a city", "parameters": {"type": "object",
"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}
{"role": "user", "content": "What is the weather in Paris?"}
{"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function"}]}

# Heading
- first item
- second item
1. one
2. two
| column | value |
| --- | --- |
https://example.com/path?query=value&page=2
"""
