"""What ranks do when some of them are lost: leave their step, and meet anew."""
