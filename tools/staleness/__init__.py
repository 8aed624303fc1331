"""The staleness rules under simulated rings: many seeds, one seed's story, or a table of what the policies cost."""
