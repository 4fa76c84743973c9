"""How values look: charts, markup, style, theme, and the formatting of numbers and times.

Turns values into HTML or figures, and reads nothing. Which values a page shows is in `pages`.
"""
