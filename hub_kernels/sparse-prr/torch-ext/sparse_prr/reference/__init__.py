"""Plain-torch definitions of every op. They import nothing but torch."""
