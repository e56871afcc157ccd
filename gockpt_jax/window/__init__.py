"""What leaves when: the plan, the prediction of the save step, the window's life."""
