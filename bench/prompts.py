"""Fixed prompts of the speculation benchmark: 20 copy tasks, whose output repeats the prompt,
40 mixed chat turns, and 20 tasks of writing code.
"""

from __future__ import annotations

_STORY = (
    "The lighthouse keeper climbed the spiral stairs at dusk, carrying a lantern in one hand and a "
    "worn leather book in the other. "
    "Every evening he wrote down the weather, the ships that passed, and the colour of the sea. On "
    "the night of the great storm he "
    "wrote only one line: the light did not go out."
)
_CODE = """def total_price(items, tax_rate):
    subtotal = 0
    for item in items:
        subtotal = subtotal + item.price * item.quantity
    tax = subtotal * tax_rate
    return subtotal + tax"""
_LIST = (
    "1. Apples from the northern orchard\n2. Bread from the village bakery\n3. Cheese from the "
    "mountain farm\n"
    "4. Dates from the desert market\n5. Eggs from the family henhouse"
)
_JSON = (
    '{"name": "Ada Lovelace", "born": 1815, "died": 1852, "fields": '
    '["mathematics", "computing"], "known_for": "the first algorithm"}'
)
_TABLE = (
    "| city | country | population |\n|---|---|---|\n| Lima | Peru | 10719000 |\n"
    "| Oslo | Norway | 709000 |\n| Cairo | Egypt | 10107000 |"
)
_MAIL = (
    "Dear Ms Alvarez, thank you for your letter of 3 March. We have received the signed contract "
    "and will begin the renovation of the "
    "east wing on Monday, 17 April. Please make sure that the rooms on the second floor are empty "
    "by then. Yours sincerely, Tomas Berg"
)

COPY: tuple[str, ...] = (
    f"Repeat the following text exactly, word for word:\n\n{_STORY}",
    f"Copy this passage without changing anything:\n\n{_MAIL}",
    f"Repeat this code exactly as it is:\n\n{_CODE}",
    f"Write out this list again, exactly the same:\n\n{_LIST}",
    f"Repeat this JSON object exactly:\n\n{_JSON}",
    f"Copy this table exactly:\n\n{_TABLE}",
    f"Quote the whole passage in quotation marks:\n\n{_STORY}",
    f"Rewrite this letter, changing only the name Alvarez to Moreno:\n\n{_MAIL}",
    f"Rename the function total_price to compute_total and write the whole code again:\n\n{_CODE}",
    "Continue this list in the same style up to 8 entries, writing the first five "
    f"again:\n\n{_LIST}",
    f"Write this JSON again with the year of birth changed to 1816:\n\n{_JSON}",
    f"Correct any spelling mistakes and write the text again:\n\n{_STORY}",
    f"Write the same letter twice:\n\n{_MAIL}",
    f"Repeat the table twice:\n\n{_TABLE}",
    f"Add a comment above the function and repeat the code:\n\n{_CODE}",
    f"Repeat this sentence five times: {_STORY.split('.')[0]}.",
    "Write the word 'verbatim' thirty times, separated by commas.",
    f"Turn this list into JSON with the keys number and text, keeping the words:\n\n{_LIST}",
    f"What does the letter say? Quote it in full, then stop.\n\n{_MAIL}",
    "Count from 1 to 40, one number on each line, in the form 'number N'.",
)

CHAT: tuple[str, ...] = (
    "What is the capital of France?",
    "Explain why the sky is blue in two sentences.",
    "Write a short poem about the sea.",
    "What is the difference between a list and a tuple in Python?",
    "Give me three tips for sleeping better.",
    "Who wrote Pride and Prejudice?",
    "How do vaccines work?",
    "Translate 'good morning' into Spanish, French and German.",
    "Tell me a story about a fox and a crow.",
    "What is photosynthesis?",
    "Write a Python function that reverses a string.",
    "What are the planets of the solar system?",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
    "How do I boil an egg?",
    "What is the boiling point of water in Celsius and Fahrenheit?",
    "Give me a recipe for tomato soup.",
    "Why do cats purr?",
    "Write an email asking for a day off.",
    "What is machine learning?",
    "List five countries in South America.",
    "How many days are in a leap year?",
    "Describe a rainy day in the city.",
    "What is the Pythagorean theorem?",
    "Give me a riddle and its answer.",
    "How does a bicycle stay upright?",
    "What should I pack for a week in the mountains?",
    "Explain inflation to a ten-year-old.",
    "Who was Marie Curie?",
    "Write a limerick about a programmer.",
    "What is the largest ocean?",
    "How do I learn a new language?",
    "What causes earthquakes?",
    "Give three arguments for reading books.",
    "What is HTML?",
    "Write a haiku about autumn.",
    "How do airplanes fly?",
    "What is the speed of light?",
    "Name four kinds of clouds.",
    "Write a product description for a wooden chair.",
    "What is the meaning of the word 'serendipity'?",
)

CODE: tuple[str, ...] = (
    "Write a Python function that checks whether a string is a palindrome.",
    "Implement binary search over a sorted list in Python.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a JavaScript function that removes duplicates from an array.",
    "Implement quicksort in C++.",
    "Write a SQL query that finds the second highest salary in the table employees.",
    "Write a Python decorator that measures the time of a function call.",
    "Implement a linked list in Java with methods to add and remove a node.",
    "Write unit tests with pytest for a function add(a, b).",
    "Write a Python script that counts the words of a text file.",
    f"Write unit tests for this function:\n\n{_CODE}",
    f"Translate this function into JavaScript:\n\n{_CODE}",
    f"Add type hints and a docstring to this function:\n\n{_CODE}",
    "Write a Flask application with one route that returns the current time as JSON.",
    "Implement Dijkstra's shortest path algorithm in Python.",
    "Write a Go function that reads a CSV file and returns its rows.",
    "Write a Rust function that computes the factorial of a number.",
    "Write an HTML page with a form for a name and an e-mail address.",
    "Write a Python generator of the Fibonacci numbers.",
    "Write a bash script that renames all .txt files of a folder to .md.",
)
