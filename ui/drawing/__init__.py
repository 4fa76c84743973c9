"""How things look: charts, markup, style, and numbers as people read them."""
