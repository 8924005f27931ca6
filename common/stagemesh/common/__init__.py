"""What several processes of Stagemesh share."""
