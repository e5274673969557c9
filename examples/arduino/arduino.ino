// Acts on observations from the serial port, as text: eight numbers in, an action and its time out.
// First `quarl export LunarLander-v3/ppo/int8 --target c`, and copy int8.c and int8.h in here.
#include "int8.h"

void setup() {
  Serial.begin(115200);
  Serial.setTimeout(1000);
}

void loop() {
  if (!Serial.available()) return;
  float observation[POLICY_OBSERVATION_SIZE];
  for (int i = 0; i < POLICY_OBSERVATION_SIZE; i++) observation[i] = Serial.parseFloat();
  while (Serial.available() && Serial.peek() <= ' ') Serial.read();
  const unsigned long start = micros();
  const int action = policy_act(observation);
  const unsigned long taken = micros() - start;
  Serial.print(action);
  Serial.print(" in us: ");
  Serial.println(taken);
}
