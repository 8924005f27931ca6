"""What every service is made of: server, health, status mapping, settings, life cycle, plug-in cards."""
