"""What our commands for servers, our plugins inside them and the plan agree on. Imported everywhere, so it needs nothing."""

PICKS_OPTION = "glm5_next_picks"  # a key of vLLM's --additional-config: hand over the indexer's picks
SHARE_OF_GPU = 0.4  # of its memory, for a server that shares it with a trainer rank; a later flag wins
