"""A ROS 2 node that acts: `python3 ros2_policy.py --ros-args -p policy:=int8.tflite`.

Numbers of an observation on the topic `observation`, those of the action on `action`; of a discrete
policy the action's index. What the policy refuses (a wrong size, a number that is not finite) is
logged and answered by no action: let the robot stop when actions stay out.
"""

from collections.abc import Callable, Sequence

import numpy as np

from quarl_tf import Policy


def actor(path: str) -> Callable[[Sequence[float]], list[float]]:
    """Load a policy; return what turns the numbers of an observation into those of an action."""
    policy = Policy.load(path)
    shape, dtype = policy.sidecar.observation_shape, policy.sidecar.observation_dtype

    def act(numbers: Sequence[float]) -> list[float]:
        observation = np.asarray(numbers, np.float32).reshape(shape)
        if dtype == "uint8" and not np.isin(observation, np.arange(256)).all():
            raise ValueError("Bytes are whole numbers from 0 to 255.")
        return [float(number) for number in np.atleast_1d(policy.act(observation.astype(dtype)))]

    return act


def main() -> None:
    """Act on each observation until the node is shut down."""
    import rclpy
    from rclpy.qos import QoSProfile, ReliabilityPolicy
    from std_msgs.msg import Float32MultiArray

    rclpy.init()
    node = rclpy.create_node("policy")
    act = actor(node.declare_parameter("policy", "int8.tflite").value)
    actions = node.create_publisher(Float32MultiArray, "action", 1)

    def answer(observation: Float32MultiArray) -> None:
        try:
            actions.publish(Float32MultiArray(data=act(observation.data)))
        except ValueError as error:
            node.get_logger().error(str(error))

    # Old observations are worth nothing, and sensors often publish as best effort.
    profile = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    node.create_subscription(Float32MultiArray, "observation", answer, profile)
    rclpy.spin(node)


if __name__ == "__main__":
    main()
