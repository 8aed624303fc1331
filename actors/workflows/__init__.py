"""How a row of data becomes an episode."""
